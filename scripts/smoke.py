"""Hard checks on ten steps of each trainer, so that a long run is not started on a broken machine.

python -m scripts.smoke results/smoke-scratch/metrics.csv results/smoke-trl/metrics.csv --out results/smoke.json
"""

import argparse
import json
import sys
from pathlib import Path

import pandas as pd

from scripts.prepared import sha256_of

# Of the log-probs of engine and trainer, in nats a token. Measured: 0.005 to 0.009 with a bf16 engine on an H200, 1e-7
# with an fp32 engine on a CPU, and flat over the run; what grows from step to step is an engine that is not pushed to.
LARGEST_DIFFERENCE = 0.05
GROWTH, SMALLEST_DIFFERENCE = 3.0, 1e-4
# The policy ratio is exactly 1 on policy; the correction is a mean over few sequences, each the product of its tokens'.
RATIO_BANDS = {"ratio_mean": 0.1, "correction_mean": 0.5}


def faults(metrics: pd.DataFrame, device_gib: float | None) -> list[str]:
    """What is wrong with a run, in words; an empty list where all is well.

    Args:
        metrics: the run's metrics.csv.
        device_gib: memory of the GPU, or None on a CPU.
    """
    found = []
    # Validation is looked at in some steps only; what a trainer cannot know is empty throughout.
    numbers = metrics.drop(columns="validation_accuracy", errors="ignore")
    numbers = numbers.select_dtypes("number").dropna(axis="columns", how="all")
    if not numbers.map(lambda value: abs(value) < float("inf")).all(axis=None):
        broken = [name for name in numbers if not (numbers[name].abs() < float("inf")).all()]
        found.append(f"values that are no numbers in {', '.join(broken)}: lower learning_rate, or set precision: fp32")
    if (metrics["degenerate_groups"] == 1).all():
        found.append(
            "every group got equal rewards in every step, so all advantages are 0 and nothing is learned: "
            f"accuracy is {metrics['accuracy'].mean():.1%} and {metrics['truncated_share'].mean():.0%} of completions "
            "are truncated; see whether the model can solve the questions at all, or raise max_completion_tokens"
        )
    if (metrics["grad_norm"] == 0).all():
        found.append("the gradient is 0 in every step")
    for column, band in RATIO_BANDS.items():
        values = metrics[column].dropna()
        if len(values) and (values - 1).abs().max() > band:
            found.append(f"{column} leaves 1 +- {band} (up to {values[(values - 1).abs().idxmax()]:.3f})")
    difference = metrics["logprob_difference"].dropna()
    grown = len(difference) > 1 and difference.iloc[-1] > max(GROWTH * difference.iloc[0], SMALLEST_DIFFERENCE)
    if len(difference) and (grown or difference.max() > LARGEST_DIFFERENCE):
        found.append(
            f"the engine does not follow the trainer: their log-probs differ by up to {difference.max():.3f} nats "
            f"a token ({difference.iloc[0]:.2g} in the first step, and at most {LARGEST_DIFFERENCE} is sound); "
            "sync_every must be 1"
        )
    if device_gib and metrics["memory_gib"].max() > 0.95 * device_gib:
        found.append(
            f"memory is nearly full ({metrics['memory_gib'].max():.1f} of {device_gib:.1f} GiB): "
            "lower max_tokens_per_micro_batch or engine.memory_gib"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metrics", type=Path, nargs="+", help="metrics.csv of each run; manifest.json lies beside it")
    parser.add_argument("--out", type=Path, required=True, help="verdicts, as JSON")
    args = parser.parse_args()
    verdicts = {}
    for path in args.metrics:
        manifest = json.loads((path.parent / "manifest.json").read_text(encoding="utf-8"))
        if manifest.get("metrics_sha256") not in (None, sha256_of(path)):
            sys.exit(f"smoke: {path} is not the file that the run wrote; delete it and run the same command")
        metrics = pd.read_csv(path)
        gpus = manifest["hardware"]["gpus"]
        run, found = manifest["run"], faults(metrics, gpus[0]["memory_gib"] if gpus else None)
        unknown = [c for c in ("ratio_mean", "logprob_difference") if metrics[c].isna().all()]
        verdicts[run] = found
        cost = f"{len(metrics)} steps, {metrics['seconds_step'].median():.2f} s, {metrics['memory_gib'].max():.1f} GiB"
        blind = f"; this trainer cannot know {', '.join(unknown)}" if unknown else ""
        print(f"{run}: {'; '.join(found) or 'sound'} ({cost}{blind})")
    if any(verdicts.values()):
        sys.exit("smoke: not sound; a long run would waste its time")
    args.out.write_text(json.dumps(verdicts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

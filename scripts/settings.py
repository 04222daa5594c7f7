"""config.yaml -> checked settings of one scale, before any job starts. Imports nothing heavy."""

import difflib
import functools
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import yaml

SCALES = ("full", "demo")
SMOKE_STEPS = 10
LARGEST = 2**31 - 1  # whole number: what every library takes as a seed or a count
VALUES = 100_000  # in a config file, with everything that it refers to written out
SCHEMA = Path(__file__).parents[1] / "workflow" / "schemas" / "config.schema.yaml"


class SettingsError(Exception):
    """All faults of a config file, one a line."""


def read(path: Path) -> dict[str, Any]:
    """The sections of a config file, more strictly than YAML: nothing stands twice, nothing holds itself.

    Raises:
        SettingsError: naming the file, the line where there is one, and what is wrong there.
    """
    try:
        loader = _Loader(path.read_text(encoding="utf-8"))
        try:
            node = loader.get_single_node()
            _count_values(node, {})
            config = loader.construct_document(node) if node else None
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}, line {mark.line + 1}" if mark else str(path)
        hint = " (indent with spaces)" if "\\t" in str(error.problem) else ""
        said = ", ".join(filter(None, (error.context, error.problem)))
        raise SettingsError(f"{place}: {said}{hint}") from None
    except yaml.reader.ReaderError as error:
        raise SettingsError(f"{path}: the character #x{error.character:04x} may not stand in YAML") from None
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: byte {error.start + 1} is no UTF-8 text; save the file as UTF-8") from None
    except RecursionError:
        raise SettingsError(f"{path}: is nested too deeply") from None
    except ValueError as error:  # a date that is none, a number of thousands of digits
        raise SettingsError(f"{path}: a value cannot be read: {error}") from None
    except OSError as error:
        raise SettingsError(
            f"{path}: cannot be read: {error.strerror}; run the command in the project's folder"
        ) from None
    if not isinstance(config, dict):
        raise SettingsError(f"{path}: {_shown(config)} is no list of sections (scale:, model:, data:, ...)")
    return config


def load(config: dict[str, Any], scale: str | None = None) -> dict[str, Any]:
    """Check `config` (config.yaml as read) and return the settings of its scale.

    Values written `{full: A, demo: B}` are resolved and every run carries its whole `grpo` section, overrides applied.
    The other scale's values are checked as well, so that a fault shows on whichever machine it is written.

    Raises:
        SettingsError: naming every fault with its place and its mend.
    """
    chosen = scale or config.get("scale")
    if chosen == "auto":
        chosen = "full" if gpu_present() else "demo"
    faults: list[str] = []
    if isinstance(chosen, dict):
        faults.append("scale: one of auto, full, demo; it is what {full: A, demo: B} goes by")
    loaded: dict[str, dict[str, Any]] = {}
    for s in SCALES:
        values = _pick(config, s, (), faults)
        found = _faults(values)
        faults += found
        if not found:
            loaded[s] = _resolve(values, s)
    if faults:
        raise SettingsError("\n".join(dict.fromkeys(faults)))
    return loaded[str(chosen)]


def run_settings(settings: dict[str, Any], run: str) -> dict[str, Any]:
    """What the training of `run` depends on, and nothing else."""
    shared = {name: settings[name] for name in ("scale", "prompt", "engine")}
    return {"run": run, **settings["runs"][run], **shared}


def namespace(settings: Any) -> Any:
    """`settings["grpo"]["steps"]` -> `settings.grpo.steps`, for reading in code."""
    return json.loads(json.dumps(settings), object_hook=lambda d: SimpleNamespace(**d))


def as_text(section: Any) -> str:
    """JSON with sorted keys: the same settings always give the same text, so that a reordering reruns nothing."""
    return json.dumps(section, sort_keys=True, ensure_ascii=False)


def gpu_present() -> bool:
    """True where `nvidia-smi` answers with at least one GPU."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return False
    try:
        return b"GPU" in subprocess.run([smi, "-L"], capture_output=True, check=False, timeout=30).stdout
    except subprocess.TimeoutExpired:
        return False


class _Loader(yaml.SafeLoader):
    """YAML in which a key that stands twice is a fault; elsewhere its last value wins without a word."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in lines:
                    problem = f"{key.value} stands here and in line {lines[key.value]}; remove one of them"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                lines[key.value] = key.start_mark.line + 1
        return node


def _count_values(node: yaml.Node | None, counted: dict[int, int]) -> int:
    """Values in `node` once all that it refers to is written out; `counted` holds nodes seen, 0 while in hand."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in counted:
        counted[id(node)] = 0
        parts = node.value if isinstance(node, yaml.SequenceNode) else [part for pair in node.value for part in pair]
        counted[id(node)] = 1 + sum(_count_values(part, counted) for part in parts)
    size = counted[id(node)]
    if not size or size > VALUES:
        problem = f"refers to itself more than {VALUES:,} times" if size else "refers to itself"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    return size


def _pick(value: Any, scale: str, path: tuple[str, ...], faults: list[str]) -> Any:
    if not isinstance(value, dict):
        return value
    if set(value) & set(SCALES) and not set(value) <= set(SCALES):
        faults += [
            f"{_name((*path, k))}: unknown scale{_nearest(k, SCALES)}" for k in map(str, value) if k not in SCALES
        ]
        value = {k: v for k, v in value.items() if k in SCALES}
    if value and set(value) <= set(SCALES):
        if scale not in value:
            faults.append(
                f"{_name(path)}: has no value for {scale} (write {{full: A, demo: B}}, or one value for both)"
            )
            (scale,) = value
        return _pick(value[scale], scale, path, faults)
    return {str(k): _pick(v, scale, (*path, str(k)), faults) for k, v in value.items()}


@functools.cache
def _schema() -> dict[str, Any]:
    return yaml.safe_load(SCHEMA.read_text(encoding="utf-8"))


def _faults(values: dict[str, Any]) -> list[str]:
    """Faults of one scale's values: what the schema finds, then what it cannot say."""
    faults = _schema_faults(values, _schema(), ())
    if not isinstance(values, dict):
        return faults
    for section in ("model", "data"):
        faults += _name_faults(values.get(section), section)
    grpo = values.get("grpo")
    runs = values.get("runs")
    if not isinstance(grpo, dict) or not isinstance(runs, dict):
        return faults
    grpo_schema = _schema()["properties"]["grpo"]
    grpo_sound = not any(f.startswith("grpo.") for f in faults)
    if grpo_sound:
        faults += _combination_faults(grpo, ("grpo",))
        faults += [f"grpo.{fault}" for fault in _beyond_trl(grpo)]  # what both trainers share
    for run, entry in runs.items():
        if not isinstance(entry, dict):
            continue
        overrides = {k: v for k, v in entry.items() if k != "trainer"}
        merged = _merged(grpo, overrides)
        # only the overrides are looked at here: what is missing comes from grpo
        found = _schema_faults({k: merged[k] for k in overrides}, {**grpo_schema, "required": []}, ("runs", str(run)))
        if grpo_sound and overrides and not found:
            found += _combination_faults(merged, ("runs", str(run)))
        if entry.get("trainer") == "trl" and not found and grpo_sound:
            found += [f"runs.{run}.{fault}" for fault in _beyond_trl(merged)]
        if run == "baseline" or str(run).startswith("smoke-"):
            found.append(f"runs.{run}: this name is the pipeline's own; choose another")
        faults += found
    report = values.get("report")
    if isinstance(report, dict) and isinstance(report.get("runs"), list):
        for run in report["runs"]:
            if isinstance(run, str) and run not in runs:  # what is no name, the schema has said
                faults.append(f"report.runs: there is no run {run!r}{_nearest(run, runs)}")
    return faults


def _name_faults(section: Any, path: str) -> list[str]:
    """The last part of a model's or a data set's name becomes a folder of the project, so it must be one."""
    name = section.get("name") if isinstance(section, dict) else None
    if not isinstance(name, str) or not name:
        return []
    faults = []
    if re.search(r"[\x00-\x1f\x7f{}]", name):
        faults.append(f"{path}.name: {_shown(name)} holds a brace or an invisible character; rename it")
    elif Path(name).name in ("", "..", "~") or len(Path(name).name.encode(errors="replace")) > 100:
        faults.append(f"{path}.name: {_shown(name)} does not end in a name of its own, of at most 100 bytes")
    elif section.get("source") in ("hub", "modelscope") and not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name, re.ASCII):
        faults.append(f"{path}.name: {_shown(name)} is no id such as Qwen/Qwen3-0.6B; for a folder set source: local")
    return faults


def _combination_faults(grpo: dict[str, Any], path: tuple[str, ...]) -> list[str]:
    faults = []
    if grpo["updates_per_batch"] > 1 and grpo["old_logprobs"] == "detach":
        faults.append(
            f"{_name(path)}.old_logprobs: detach is exact for one update a batch, and updates_per_batch is "
            f"{grpo['updates_per_batch']}; set recompute"
        )
    if grpo["old_logprobs"] == "sampler" and grpo["importance_correction"] != "none":
        faults.append(
            f"{_name(path)}.old_logprobs: with sampler the ratio already makes up for the sampler; "
            "set importance_correction: none"
        )
    if grpo["loss_type"] == "cispo" and grpo["epsilon_high"] < 1:
        faults.append(
            f"{_name(path)}.epsilon_high: with loss_type: cispo it caps the ratio itself, so "
            f"{grpo['epsilon_high']:g} would cut every token; set 5.0"
        )
    if grpo["delta"] is not None and (grpo["loss_type"] == "cispo" or grpo["delta"] <= 1 + grpo["epsilon_high"]):
        faults.append(
            f"{_name(path)}.delta: {grpo['delta']:g} must lie above 1 + epsilon_high "
            f"({1 + grpo['epsilon_high']:g}), and loss_type: cispo has none; set null"
        )
    if grpo["kl_estimator"] == "k1" and grpo["beta"] and not grpo["kl_bias_correction"]:
        faults.append(
            f"{_name(path)}.kl_estimator: k1 has no gradient without kl_bias_correction: true; set that, or k3"
        )
    if grpo["weights_dtype"] == "bf16" and grpo["precision"] != "bf16":
        faults.append(f"{_name(path)}.precision: weights in bf16 compute in bf16; set precision: bf16")
    if grpo["warmup_steps"] > grpo["steps"]:
        faults.append(
            f"{_name(path)}.warmup_steps: {grpo['warmup_steps']} is more than the {grpo['steps']} steps of the run"
        )
    if grpo["prompts_per_step"] % grpo["processes"]:
        faults.append(
            f"{_name(path)}.processes: {grpo['processes']} processes cannot share {grpo['prompts_per_step']} prompts "
            "evenly; take a divisor of prompts_per_step"
        )
    if not any(grpo["reward_weights"].values()):
        faults.append(f"{_name(path)}.reward_weights: all are 0, so no completion is better than another")
    return faults


def _beyond_trl(grpo: dict[str, Any]) -> list[str]:
    """Settings that TRL has no counterpart for; a run must not look as if it had used them."""
    faults = []
    if grpo["sync_every"] != 1:
        faults.append(
            "sync_every: TRL pushes before every rollout; leave it at 1, or set it for a run with trainer: scratch"
        )
    if grpo["kl_estimator"] != "k3":
        faults.append("kl_estimator: TRL has k3 only; leave it at k3, or set it for a run with trainer: scratch")
    if grpo["old_logprobs"] == "sampler":
        faults.append("old_logprobs: TRL has no sampler; take another, or set it for a run with trainer: scratch")
    return faults


def _merged(grpo: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    merged = {**grpo, **overrides}
    ours, theirs = grpo.get("reward_weights"), overrides.get("reward_weights")
    if isinstance(ours, dict) and isinstance(theirs, dict):
        merged["reward_weights"] = ours | theirs
    return merged


def _resolve(values: dict[str, Any], scale: str) -> dict[str, Any]:
    """Merge the runs' overrides into whole grpo sections, and write every number as its type says (1 -> 1.0)."""
    grpo = values["grpo"]
    runs = {}
    for name, entry in values["runs"].items():
        overrides = {k: v for k, v in entry.items() if k != "trainer"}
        runs[name] = {"trainer": entry["trainer"], "grpo": _merged(grpo, overrides)}
    for trainer in ("scratch", "trl"):
        runs[f"smoke-{trainer}"] = {"trainer": trainer, "grpo": {**grpo, "steps": SMOKE_STEPS, "warmup_steps": 0}}
    grpo_schema = _schema()["properties"]["grpo"]
    for run in runs.values():
        run["grpo"] = _typed(run["grpo"], grpo_schema)
    return {**_typed(values, _schema()), "scale": scale, "runs": runs}


def _typed(value: Any, schema: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        return {k: _typed(v, schema.get("properties", {}).get(k, {})) for k, v in value.items()}
    if isinstance(value, bool):
        return value
    if schema.get("type") == "number":
        return float(value)
    if schema.get("type") == "integer":
        return int(value)
    return value


@functools.cache
def _validator() -> Any:
    """JSON Schema, but nan and infinity are no numbers."""
    base = jsonschema.Draft202012Validator
    number = base.TYPE_CHECKER.redefine(
        "number",
        lambda _, v: (isinstance(v, float) and math.isfinite(v)) or (isinstance(v, int) and not isinstance(v, bool)),
    )
    return jsonschema.validators.extend(base, type_checker=number)


def _schema_faults(values: Any, schema: dict[str, Any], path: tuple[str, ...]) -> list[str]:
    if extreme := _extreme_faults(values, path):
        return extreme
    errors = _validator()(schema).iter_errors(values)
    # a wrong section is one fault, not one for each setting below it
    return [text for error in sorted(errors, key=lambda e: list(map(str, e.path))) for text in _in_words(error, path)]


def _extreme_faults(value: Any, path: tuple[str, ...]) -> list[str]:
    """Values that no later stage could even be given."""
    if isinstance(value, dict):
        return [
            fault for k, v in value.items() for fault in _extreme_faults(k, path) + _extreme_faults(v, (*path, str(k)))
        ]
    if isinstance(value, list):
        return [fault for v in value for fault in _extreme_faults(v, path)]
    if isinstance(value, str) and not value.isascii() and re.search("[\ud800-\udfff]", value):
        return [f"{_name(path)!a}: {value!a} holds half a character (\\ud800 to \\udfff)"]
    if isinstance(value, int | float) and abs(value) > LARGEST and value not in (math.inf, -math.inf):
        return [f"{_name(path)}: is too large (at most {LARGEST})"]
    return []


def _in_words(error: jsonschema.ValidationError, prefix: tuple[str, ...]) -> list[str]:
    path = (*prefix, *map(str, error.absolute_path))
    name, value, wanted = _name(path), error.instance, error.validator_value
    match error.validator:
        case "additionalProperties":
            known = error.schema["properties"]
            return [
                f"{_name((*path, str(k)))}: unknown setting{_nearest(str(k), known)}" for k in value if k not in known
            ]
        case "required":
            return [f"{_name((*path, k))}: missing" for k in wanted if k not in value]
        case "type":
            return [f"{name}: {_type_fault(value, wanted)}"]
        case "enum":
            options = ", ".join(map(str, wanted))
            return [f"{name}: {_shown(value)} is not one of {options}{_nearest(str(value), wanted)}"]
        case "minimum":
            return [f"{name}: {value} is too small (at least {wanted})"]
        case "exclusiveMinimum":
            return [f"{name}: {value} is too small (more than {wanted})"]
        case "maximum":
            return [f"{name}: {value} is too large (at most {wanted})"]
        case "pattern":  # the only pattern is the runs' names: they become folders
            return [f"{_name(path)}: {_shown(value)} is no name for a run (letters, digits, '.', '_' and '-')"]
        case "minLength" | "minItems" | "minProperties":
            return [f"{name}: is empty"]
        case "uniqueItems":
            return [f"{name}: names a run twice"]
    return [f"{name}: {error.message}"]


def _type_fault(value: Any, wanted: str | list[str]) -> str:
    words = {
        "number": "a number",
        "integer": "a whole number",
        "string": "text",
        "boolean": "true or false",
        "object": "a section of settings",
        "array": "a list",
        "null": "null",
    }
    kind = " or ".join(words[w] for w in ([wanted] if isinstance(wanted, str) else wanted))
    if isinstance(value, str):
        hint = ""
        if "number" in kind:
            try:
                mantissa, _, exponent = value.lower().partition("e")
                fixed = f"{float(mantissa)}e{int(exponent):+d}" if exponent else f"{float(mantissa):g}"
                # YAML reads a number with an exponent as text unless it has both a point and a sign
                hint = f" (write {fixed})" if math.isfinite(float(value)) and float(value) == float(fixed) else ""
            except ValueError:
                pass
        return f"{value!r} is text, not {kind}{hint}"
    return f"{_shown(value)} is not {kind}"


def _shown(value: Any) -> str:
    text = "nothing" if value is None else repr(value) if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _name(path: tuple[str, ...]) -> str:
    return ".".join(path) or "config.yaml"


def _nearest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, [str(k) for k in known], n=1)
    return f"; did you mean {close[0]}?" if close else ""

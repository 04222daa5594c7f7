"""One self-contained HTML file: tables by the template, curves and completions as data that page.js draws."""

import base64
import gzip
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plotly.offline
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from scripts.report import compare, health, words
from scripts.report.read import BASELINE, Run, read_baseline, read_run

SOURCES = Path(__file__).parents[2] / "reports"
# A run may be set up without these, or be older than they are; their absence is no fault.
OPTIONAL = {
    *("validation_accuracy", "correction_mean", "kl_sampler", "sampler_ratio_max", "corrected_share"),
    *("weights_moved", "bad_rewards", "skipped"),
}
PERCENT = {
    *("accuracy", "validation_accuracy", "truncated_share", "clip_fraction", "degenerate_groups"),
    *("corrected_share", "weights_moved", "skipped"),
}
NOT_AT_ZERO = {"reward_format", "bad_rewards", "skipped"}  # at 0 throughout, these would only take room
MEASURED_RARELY = {"validation_accuracy"}  # drawn as points
SET = {"learning_rate"}  # chosen, not measured: a mean over steps would misstate it
EXPECTED = [
    *(name for names in words.CURVES.values() for name in names if name not in OPTIONAL),
    *("step", "seconds", "tokens", "prompts", "memory_gib", "seconds_step"),
    *compare.PHASES,
]
# Beginnings of the keys of the sentences that page.js says.
SCRIPT_TEXTS = (
    *("axis_title_", "smoothing_", "flexible", "strict", "seconds_", "other", "filter_", "answer_", "browser_old"),
    *("no_completion", "right", "wrong", "not_strict", "truncated", "tokens_unit", "cut", "comma", "range", "gold"),
)
# plotly.js takes 4.9 MB of a page that should stay under 8 MB; curves and tables need far less than the rest.
COMPLETIONS_BYTES = 2_300_000
LONGEST_COMPLETION = 6_000  # characters; what is beyond is counted, not shown


def build(names: Sequence[str], results: Path, settings: dict[str, Any], target: str) -> str:
    """The page over `results/<name>/` for every name, as HTML. `settings` is the `report` section plus `scale`."""
    language = settings.get("language") or "en"
    t = words.texts(language)
    baseline = read_baseline(results / BASELINE)
    runs = [read_run(results / name, EXPECTED) for name in dict.fromkeys(names)]
    everyone = [baseline, *runs]
    pairs = compare.paired_all(runs)
    sections, unrecorded, zeros = _sections(runs, t)
    verdicts = [_health(run, t) for run in runs]
    packed, shown, total = _completions(everyone)
    data = {
        "runs": [_curves(run, sections) for run in runs],
        "figures": [figure for section in sections for figure in section["figures"]],
        "smoothing": max(1, int(settings.get("smoothing") or 1)),
        "evaluation": [_bars(run) for run in everyone],
        "cost": [_cost_bars(run) for run in runs],
        "texts": {key: text for key, text in t.items() if key.startswith(SCRIPT_TEXTS)},
    }
    script = (SOURCES / "page.js").read_text(encoding="utf-8")
    plotly_js = plotly.offline.get_plotlyjs()
    environment = Environment(
        loader=FileSystemLoader(SOURCES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("template.html.j2").render(
        t=t,
        language=language,
        words=words,
        runs=runs,
        evaluation=[_evaluation_row(run, t) for run in everyone],
        headline=words.headline(baseline, runs, pairs, t),
        notes=words.notes(baseline, runs, t),
        demo=settings.get("scale") == "demo",
        cards=_cards(baseline, runs, t),
        pairs=_pair_rows(pairs, baseline, runs, t),
        sampled=_sampled(everyone, t),
        verdicts=verdicts,
        paired_runs=len(pairs),
        sections=sections,
        unrecorded=unrecorded,
        zeros=zeros,
        axes=["step", *(["completions"] if _counts_completions(runs) else []), "seconds"],
        checks=_check_rows(runs, t),
        settings=_settings_rows(runs, t),
        settings_sum=_settings_sum(runs, t),
        costs=[compare.cost(run) for run in runs],
        phases=[*compare.PHASES, "other"],
        memory=compare.memory(runs),
        packed=packed,
        shown=shown,
        total=total,
        provenance=_provenance(runs, t),
        target=target,
        data=Markup(_json_for_html(data)),
        style=Markup((SOURCES / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        plotly_js=Markup(plotly_js),
        script_hashes=[_csp_hash(plotly_js), _csp_hash(script)],
    )


def _json_for_html(data: Any) -> str:
    """JSON that no HTML parser can read as markup, whatever the strings hold."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _csp_hash(script: str) -> str:
    """The page's policy names its two scripts by digest, so that nothing else on it can ever run."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


# Evaluation


def _cards(baseline: Run, runs: Sequence[Run], t: words.Texts) -> list[dict[str, str]]:
    before = baseline.score("flexible")
    cards = []
    for run in [baseline, *runs]:
        score = run.score("flexible")
        gained = score and before and run is not baseline
        cards.append(
            {
                "name": run.name,
                "value": words.percent(score["accuracy"]) if score else "\u2013",
                "gain": words.points(score["accuracy"] - before["accuracy"], t) if gained else "",
                "missing": "" if score else t["not_evaluated"],
            }
        )
    return cards


def _evaluation_row(run: Run, t: words.Texts) -> dict[str, Any]:
    truncated = run.evaluation.get("truncated")
    share = truncated.get("share") if isinstance(truncated, dict) else None
    length = run.evaluation.get("completion_length_mean")
    return {
        "name": run.name,
        "scores": [_score(run, kind, t) for kind in ("flexible", "strict")],
        "truncated": words.percent(share) if isinstance(share, int | float) else "\u2013",
        "length": t["tokens_unit"].format(count=words.number(length)) if isinstance(length, int | float) else "\u2013",
    }


def _score(run: Run, kind: str, t: words.Texts) -> dict[str, str]:
    return _score_cell(run.score(kind), t, run.evaluation.get("rows"))


def _score_cell(score: dict[str, Any], t: words.Texts, rows: int | None = None) -> dict[str, str]:
    if "accuracy" not in score:
        return {"value": "", "interval": "", "count": ""}
    bounds = {name: words.percent(score[name]) for name in ("low", "high") if name in score}
    interval = t["interval"].format(**bounds) if len(bounds) == 2 else ""
    count = (
        t["right_of"].format(correct=words.number(score["correct"]), rows=words.number(rows))
        if rows and "correct" in score
        else ""
    )
    return {"value": words.percent(score["accuracy"]), "interval": interval, "count": count}


def _bars(run: Run) -> dict[str, Any]:
    return {"name": run.name, "flexible": run.score("flexible"), "strict": run.score("strict")}


def _pair_rows(
    pairs: Sequence[tuple[int, int, compare.Paired]], baseline: Run, runs: Sequence[Run], t: words.Texts
) -> list[dict[str, Any]]:
    """The pairs of runs, which answer the page's question, then each run against the baseline."""

    def row(first: Run, second: Run, table: compare.Paired, p: float, indices: list[int]) -> dict[str, Any]:
        better = (second if table.difference > 0 else first).name
        says = t["says_better"].format(run=better) if p < compare.SIGNIFICANT else t["says_agree"]
        return {"first": first.name, "second": second.name, "table": table, "says": says, "indices": indices}

    rows = []
    for (first, second, table), p in zip(pairs, compare.corrected(pairs), strict=True):
        rows.append(row(runs[first], runs[second], table, p, [first, second]))
    for index, run in enumerate(runs):
        against = compare.paired(compare.right(baseline), compare.right(run))
        if against:
            rows.append(row(baseline, run, against, against.p, [index]))
    return rows


def _sampled(everyone: Sequence[Run], t: words.Texts) -> dict[str, Any]:
    """pass@k and majority of the runs whose evaluation drew several answers a question; empty where none did."""
    drawn = [(i, run, run.sampled) for i, run in enumerate(everyone, start=-1) if run.sampled]
    ks = sorted({int(k) for _, _, sampled in drawn for k in sampled["pass_at_k"]})
    rows = []
    for index, run, sampled in drawn:
        majority = sampled.get("majority")
        shares = [sampled["pass_at_k"].get(str(k)) for k in ks]
        rows.append(
            {
                "index": index,
                "name": run.name,
                "how": t["sampled_how"].format(count=sampled.get("samples"), temperature=sampled.get("temperature")),
                "shares": ["\u2013" if share is None else words.percent(share) for share in shares],
                "majority": _score_cell(majority if isinstance(majority, dict) else {}, t),
            }
        )
    return {"ks": ks, "rows": rows} if rows else {}


# Curves


def _sections(runs: Sequence[Run], t: words.Texts) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """The figures by section, the titles of those that no run has numbers for, and of those left out at 0."""
    sections = []
    unrecorded = []
    zeros = []
    for name, columns in words.CURVES.items():
        figures = []
        for column in columns:
            values = [value for run in runs for value in run.known(column)]
            if column in NOT_AT_ZERO and values and not any(values):
                zeros.append(t["figures"][column]["title"])
            elif values:
                figures.append(_figure(column, runs, t))
            elif any(run.steps for run in runs):
                unrecorded.append(t["figures"][column]["title"])
        if figures:
            sections.append({"title": t[f"section_{name}"], "figures": figures})
    return sections, unrecorded, zeros


def _figure(column: str, runs: Sequence[Run], t: words.Texts) -> dict[str, Any]:
    show = words.percent if column in PERCENT else words.number
    ends = []
    silent = []
    for index, run in enumerate(runs):
        known = run.known(column)
        if known:
            tenth = max(1, len(known) // 10)
            first, last = sum(known[:tenth]) / tenth, sum(known[-tenth:]) / tenth
            ends.append({"index": index, "name": run.name, "first": show(first), "last": show(last)})
        elif run.steps:
            silent.append(run.name)
    title, caption = t["figures"][column]["title"], t["figures"][column]["text"]
    values = t["semicolon"].join(t["alternative_run"].format(**end) for end in ends)
    return {
        "column": column,
        "title": title,
        "caption": caption,
        "percent": column in PERCENT,
        "points": column in MEASURED_RARELY,
        "smooth": column not in SET,
        "ends": ends,
        "silent": t["not_recorded"].format(runs=words.listing(silent, t)) if silent else "",
        "alternative": t["alternative"].format(title=title, values=values, caption=caption),
    }


def _curves(run: Run, sections: Sequence[dict[str, Any]]) -> dict[str, Any]:
    sequences = run.used.get("sequences_per_step")
    steps = run.columns.get("step", [])
    drawn = [figure["column"] for section in sections for figure in section["figures"]]
    return {
        "name": run.name,
        "x": {
            "step": _rounded(steps),
            "completions": [step * sequences for step in steps] if _is_count(sequences) else [],
            "seconds": _rounded(run.columns.get("seconds", [])),
        },
        "columns": {column: _rounded(run.columns[column]) for column in drawn if run.known(column)},
    }


def _counts_completions(runs: Sequence[Run]) -> bool:
    """Whether every run with steps says how many completions a step samples, so that they share that axis."""
    started = [run for run in runs if run.steps]
    return bool(started) and all(_is_count(run.used.get("sequences_per_step")) for run in started)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    """Six digits: more than a screen can show, half the bytes."""
    return [None if value is None else float(f"{value:.6g}") for value in values]


# Health


def _health(run: Run, t: words.Texts) -> dict[str, Any]:
    """A run's verdict, its findings, and which checks it rests on."""
    examined = health.examine(run)
    verdict = "single"
    if examined.findings:
        verdict = "differs" if any(found.grave for found in examined.findings) else "unknown"
    elif examined.passed:
        verdict = "same"
    return {
        "name": run.name,
        "verdict": verdict,
        "says": t[f"health_{verdict}"],
        "edited": run.edited,
        "findings": [words.finding(found, t) for found in examined.findings],
        "passed": words.checked(examined.passed, t),
        "unchecked": words.checked(examined.unchecked, t),
    }


# Settings and checks


def _check_rows(runs: Sequence[Run], t: words.Texts) -> list[dict[str, Any]]:
    rows = []
    for check in compare.three_places(runs):
        cells = [[(name, words.setting(value, t)) for name, value in values.items()] for values in check.values]
        said = {"place": t[f"place_{check.place}"], "says": t[f"verdict_{check.verdict}"]}
        details = [t[key].format(**values) for key, values in check.details]
        rows.append({**said, "cells": cells, "verdict": check.verdict, "details": details})
    return rows


def _settings_rows(runs: Sequence[Run], t: words.Texts) -> list[dict[str, Any]]:
    rows = []
    for row in compare.settings_rows(runs):
        cells = []
        for asked, used in zip(row.asked, row.used, strict=True):
            refused = compare.MISSING not in (asked, used) and not compare.same(asked, used)
            hint = t["not_as_asked"].format(value=words.setting(asked, t)) if refused else ""
            cells.append({"value": words.setting(used, t), "hint": hint, "missing": used is compare.MISSING})
        verdict = {"name": row.verdict, "says": t[f"verdict_{row.verdict}"]}
        rows.append({"setting": row.setting, "trl_name": row.trl_name, "cells": cells, "verdict": verdict})
    return rows


def _settings_sum(runs: Sequence[Run], t: words.Texts) -> str:
    verdicts = [row.verdict for row in compare.settings_rows(runs)]
    if len(runs) < 2:
        return t["settings_sum_one"].format(count=len(verdicts))
    return t["settings_sum"].format(**{name: verdicts.count(name) for name in ("same", "asked", "differs")})


# Cost


def _cost_bars(run: Run) -> dict[str, Any]:
    cost = compare.cost(run)
    return {"name": run.name, "phases": {**cost.phases, "other": cost.other}}


# Completions


def _completions(everyone: Sequence[Run]) -> tuple[str, int, int]:
    """The completions of all runs by question, as gzip in base64 of at most COMPLETIONS_BYTES; how many, of how many.

    Packing also keeps a completion from ever being parsed as HTML: the page holds base64, the browser gets text.
    """
    questions: dict[str, dict[str, Any]] = {}
    for run in everyone:
        for name, row in run.samples.items():
            questions.setdefault(name, {"id": name, "question": _text(row, "question"), "gold": _text(row, "gold")})
    total = shown = len(questions)
    if not total:
        return "", 0, 0
    ordered = [questions[name] for name in sorted(questions)]
    while True:
        chosen = [ordered[i * total // shown] for i in range(shown)]
        content = [{**row, "runs": [_sample(run.samples.get(row["id"])) for run in everyone]} for row in chosen]
        # mtime=0 because the same inputs must give the same bytes.
        packed = base64.b64encode(gzip.compress(json.dumps(content).encode(), 6, mtime=0)).decode()
        if len(packed) <= COMPLETIONS_BYTES or shown == 1:
            return packed, shown, total
        shown = max(1, min(shown - 1, int(shown * COMPLETIONS_BYTES / len(packed) * 0.97)))


def _sample(row: dict[str, Any] | None) -> dict[str, Any] | None:
    if row is None:
        return None
    completion = _text(row, "completion")
    return {
        "text": completion[:LONGEST_COMPLETION],
        "cut": max(0, len(completion) - LONGEST_COMPLETION),
        "answer": _text(row, "answer"),
        "kind": _text(row, "kind"),
        "correct": bool(row.get("correct")),
        "strict": bool(row.get("strict")),
        "truncated": bool(row.get("truncated")),
        "tokens": row.get("tokens"),
    }


def _text(row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    return "" if value is None else str(value)


# Provenance


def _provenance(runs: Sequence[Run], t: words.Texts) -> list[dict[str, Any]]:
    """Rows (what, one text a run, whether the runs differ), packages last."""

    def row(what: str, values: list[Any], must_agree: bool = False) -> dict[str, Any]:
        known = {str(value) for value in values if value not in (None, "")}
        return {
            "what": what,
            "cells": ["\u2013" if value in (None, "") else words.setting(value, t) for value in values],
            "differs": must_agree and len(known) > 1,
        }

    def of(key: str) -> list[Any]:
        return [run.manifest.get(key) for run in runs]

    rows = [
        row(t["status"], [words.status(run, t) for run in runs]),
        row(t["trainer"], of("trainer")),
        row(t["seed"], [run.asked.get("seed") for run in runs], must_agree=True),
        row(t["model"], of("model"), must_agree=True),
        row(t["commit"], of("commit"), must_agree=True),
        row(t["code_digest"], of("code_digest")),
        row(t["data_digest"], of("data_digest"), must_agree=True),
        row(t["hardware"], of("hardware"), must_agree=True),
        row(t["started"], of("started")),
        row(t["finished"], of("finished")),
        row(t["duration"], [words.seconds(compare.cost(run).run_seconds) for run in runs]),
        row(t["engine"], [run.evaluation.get("engine") for run in runs], must_agree=True),
        row(t["evaluation_seconds"], [words.seconds(compare.cost(run).evaluation_seconds) for run in runs]),
        row(t["command"], of("command")),
    ]
    versions = [run.manifest["versions"] if isinstance(run.manifest.get("versions"), dict) else {} for run in runs]
    packages = sorted({package for installed in versions for package in installed})
    for package in packages:
        rows.append(row(package, [installed.get(package) for installed in versions], must_agree=True))
    return rows

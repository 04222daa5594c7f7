"""Grade anyone's completions: `python -m scripts.grade FILE.jsonl` prints the score and the rows worth a second look.

FILE has one JSON object a line, with `completion` (text, or chat messages) and `gold` (the reference number);
`truncated` (true or false) is optional. The `samples.jsonl` of a run is such a file.

Exit status: 0; 1 when lines were damaged (they are named and left out); 2 when nothing could be graded.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

from scripts.grpo_scratch.rewards import agrees, extract_answer, parse_gold, spoken_text, strict_answer, strict_match

WEAK = {"correction", "bold", "first", "last_number"}  # kinds of answer that had to be read out of running text


def rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """(line number, row) of a JSONL file without its blank lines; of a damaged line, the reason instead of the row."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield number, _checked(json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8")))
                except (ValueError, TypeError, RecursionError) as error:
                    yield number, str(error) or type(error).__name__


def _checked(row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"expected an object with completion and gold, found {type(row).__name__}")
    if missing := [field for field in ("completion", "gold") if field not in row]:
        raise ValueError(f"no field {' and no field '.join(missing)}; it has {', '.join(row) or 'none'}")
    spoken_text(row["completion"])
    row["gold"] = str(row["gold"])
    parse_gold(row["gold"])
    return row


def dispute(row: dict[str, Any]) -> str | None:
    """Why a reader might grade this row otherwise; None if there is no doubt."""
    answer = extract_answer(row["completion"], row.get("truncated", False))
    strict, gold = strict_answer(row["completion"]), parse_gold(row["gold"])
    value = answer.value
    if agrees(answer, row["gold"], row["completion"]):
        if strict is not None and strict != gold:
            return f"right, but the #### line says {strict}"
        if answer.kind in WEAK:
            return f"right, but on a weak cue ({answer.kind})"
        return "right, but truncated" if row.get("truncated") else None
    if strict == gold:
        return f"wrong ({answer.kind}), but the #### line is right"
    if value is None:
        occurs = re.search(rf"(?<![\d.,]){re.escape(row['gold'])}(?![\d.,]*\d)", spoken_text(row["completion"]) or "")
        return f"no answer ({answer.kind}), but the reference number occurs" if occurs else None
    if gold and value in (gold / 100, gold * 100, -gold):
        return f"wrong, but {value} is the reference in other units or with another sign"
    near = max(Fraction(1), abs(gold) / 100)
    return f"wrong, but {value} is close" if abs(value - gold) < near else None


def _share(count: int, total: int) -> str:
    from scipy.stats import binomtest  # half a second to import, which --help and a wrong file can do without

    interval = binomtest(count, total).proportion_ci(method="wilson")
    return f"{count / total:6.1%}  [{interval.low:.1%}, {interval.high:.1%}]  {count} of {total}"


def _end(completion: Any) -> str:
    """The last words of a completion on one line, printable whatever they hold."""
    text = " ".join((spoken_text(completion) or "(thinking never closed)")[-400:].split())
    return text[-100:].encode("utf-8", "backslashreplace").decode()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.grade", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, metavar="FILE.jsonl", help="completions to grade")
    path = parser.parse_args().file
    graded, damaged = [], []
    try:
        for number, row in rows(path):
            if isinstance(row, str):
                damaged.append(f"  line {number}: {row}")
            else:
                graded.append((number, row))
    except OSError as error:
        print(f"cannot read {path}: {error.strerror}", file=sys.stderr)
        return 2
    if damaged:
        print(f"{len(damaged)} damaged lines in {path}, not graded:", *damaged, sep="\n", file=sys.stderr)
    if not graded:
        print(f"nothing to grade in {path}: each line needs the fields completion and gold", file=sys.stderr)
        return 2

    answers = [extract_answer(row["completion"], row.get("truncated", False)) for _, row in graded]
    flexible = sum(agrees(a, row["gold"], row["completion"]) for a, (_, row) in zip(answers, graded, strict=True))
    strict = sum(strict_match(row["completion"], row["gold"]) for _, row in graded)
    kinds = Counter(answer.kind for answer in answers).most_common()
    disputes = [(number, row, reason) for number, row in graded if (reason := dispute(row))]

    print(f"rows       {len(graded)}")
    print(f"flexible  {_share(flexible, len(graded))}   (the number a reader takes from it; 95 % Wilson interval)")
    print(f"strict    {_share(strict, len(graded))}   (the line `#### number`)")
    if any("truncated" in row for _, row in graded):
        print(f"truncated {_share(sum(bool(row.get('truncated')) for _, row in graded), len(graded))}")
    print("answers    " + ", ".join(f"{kind} {count}" for kind, count in kinds))
    print(f"disputable {len(disputes)}" + (": read these" if disputes else ""))
    for number, row, reason in disputes:
        print(f"  line {number}: {reason}; reference {row['gold']} | ...{_end(row['completion'])}")
    return 1 if damaged else 0


if __name__ == "__main__":
    sys.exit(main())

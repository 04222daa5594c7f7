"""`python -m scripts.report`: writes the page of one or several runs.

Example: python -m scripts.report --settings '{"smoothing": 10}' --runs scratch trl --out results/trl/report.html
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from scripts.report.page import build


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.report", description="Write the page of the runs.")
    parser.add_argument("--settings", type=_settings, default={}, help='JSON: report of config.yaml, plus "scale"')
    parser.add_argument("--run", help="the run whose page this is; it is put last unless --runs names it")
    parser.add_argument("--runs", nargs="+", help="the runs to lay over each other; default: the settings' runs")
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder with one folder a run")
    parser.add_argument("--out", type=Path, required=True, help="the HTML file to write")
    arguments = parser.parse_args()
    names = [*(arguments.runs or arguments.settings.get("runs") or []), *([arguments.run] if arguments.run else [])]
    if not names:
        parser.error("name at least one run: --runs scratch trl")
    try:
        html = build(names, arguments.results, arguments.settings, arguments.out.as_posix())
    except ValueError as error:
        sys.exit(str(error))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    content = html.encode(errors="replace")
    arguments.out.write_bytes(content)
    print(f"{arguments.out}: {len(content) / 1e6:.1f} MB, {len(dict.fromkeys(names))} runs")


def _settings(text: str) -> dict[str, Any]:
    """JSON given on the command line, or the path of a file that holds it."""
    try:
        settings = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise argparse.ArgumentTypeError(f"neither JSON nor a file with it ({error})") from None
    if not isinstance(settings, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return settings


if __name__ == "__main__":
    main()

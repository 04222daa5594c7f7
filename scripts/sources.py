"""Which of our own files a stage runs: it runs again when one of them changes."""

import ast
import hashlib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def imported_sources(module: str) -> list[str]:
    """Files of this project that `python -m module` may import, itself included, as sorted paths from the root.

    Imports are read from the syntax, those inside functions too, so that nothing heavy is imported to find out.
    """
    found: set[Path] = set()
    waiting = [module]
    while waiting:
        path = _file_of(waiting.pop())
        if path is None or path in found:
            continue
        found.add(path)
        package = ".".join(path.relative_to(ROOT).parent.parts)
        if path.name != "__init__.py":
            waiting.append(package)
        if path.name == "__init__.py" and (path.parent / "__main__.py").exists():
            waiting.append(f"{package}.__main__")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                waiting += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                waiting += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def digest(files: list[str]) -> str:
    """SHA-256 over names and contents of files (paths from the root)."""
    total = hashlib.sha256()
    for name in files:
        total.update(f"{name}\n".encode() + hashlib.sha256((ROOT / name).read_bytes()).digest())
    return total.hexdigest()


def _file_of(module: str) -> Path | None:
    if module.split(".")[0] != "scripts":
        return None
    path = ROOT.joinpath(*module.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None

"""Writes docs/modules.md: every module of the package with the first sentence of its docstring.

python docs/module_list.py           # or: make docs
python docs/module_list.py --check   # exit 1 when the page is not up to date
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "shardwright"
PAGE = ROOT / "docs" / "modules.md"
ORDER = (
    *("", "config", "layout", "arch", "planner", "mesh", "models", "attention", "backends", "loss"),
    *("parallel", "data", "checkpoint", "export", "measure", "launch", "train", "tools"),
)
"""Packages from the lowest layer to the highest, in the order of the import contract of pyproject.toml."""


def summary(file: Path) -> str:
    """The first paragraph of a module's docstring, on one line, up to its first full stop."""
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    line = " ".join(text.split("\n\n")[0].split())
    end = line.find(". ")
    return line if end < 0 else line[: end + 1]


def page() -> str:
    """The whole page. Raises `ValueError` for a module without a docstring or a package that `ORDER` does not name."""
    lines = ["# Modules", "", "Made by `make docs` from the docstrings: the lowest layer first.", ""]
    files = sorted(PACKAGE.rglob("*.py"))
    top = {file.relative_to(PACKAGE).parts[0] for file in files if file.parent != PACKAGE}
    if top != set(ORDER) - {""}:
        raise ValueError(
            f"ORDER of docs/module_list.py and the packages differ in {sorted(top ^ (set(ORDER) - {''}))}."
        )
    for package in ORDER:
        inside = [
            f for f in files if (f.parent == PACKAGE) is not bool(package) and f.is_relative_to(PACKAGE / package)
        ]
        lines += [f"## {package or 'shardwright'}", ""]
        if package:
            lines += [summary(PACKAGE / package / "__init__.py"), ""]
        lines += ["| module | what it has |", "|---|---|"]
        for file in inside:
            if file == PACKAGE / package / "__init__.py":
                continue
            text = summary(file)
            if not text:
                raise ValueError(f"{file.relative_to(ROOT)} has no docstring.")
            lines.append(f"| `{file.relative_to(PACKAGE)}` | {text.replace('|', chr(92) + '|')} |")
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    if "--check" in sys.argv:
        return 0 if PAGE.read_text() == page() else 1
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())

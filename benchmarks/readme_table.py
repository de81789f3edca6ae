"""Writes the README's table of measurements from the newest lines of results.jsonl: python benchmarks/readme_table.py"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
START, END = "<!-- measured: benchmarks/readme_table.py -->", "<!-- measured: end -->"


def newest() -> dict[str, dict[str, Any]]:
    """The last line of each layout."""
    lines = (HERE / "results.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines if json.loads(line)["benchmark"] == "data_parallel"]
    return {row["layout"]: row for row in rows}


def table(rows: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| layout | tokens/s, ours / bare torch | peak memory, ours / bare torch | n |",
        "|---|---|---|---|",
    ]
    for layout, row in rows.items():
        memory = f"{row['ours_bytes'] / row['bare_bytes']:.2f}" if "ours_bytes" in row else "n/a"
        lines.append(f"| `{layout}` | {row['ratio']:.2f} | {memory} | {row['n']} |")
    return "\n".join(lines)


def main() -> None:
    text = README.read_text()
    block = f"{START}\n{table(newest())}\n{END}"
    README.write_text(re.sub(f"{re.escape(START)}.*?{re.escape(END)}", lambda _: block, text, flags=re.S))


if __name__ == "__main__":
    main()

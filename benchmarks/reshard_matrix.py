"""Checkpoints of every layout read by every other, compared bit for bit: python benchmarks/reshard_matrix.py [--all]

Gloo ranks on one machine, a Llama-like model of 4 blocks with tied embedding and head of 257 rows, float64, AdamW. Each layout
trains an update and saves; whole weights and moments after a load are hashed and compared with those of the layout that
saved; then one update is made, and its loss compared to 1e-9. Prints a table of saved (rows) by loaded (columns); exit code 3
on any difference. Without --all: the pairs of tests/gloo/checkpoint/test_resharding.py.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> int:
    from tests.gloo.resharding import LAYOUTS, PAIRS, matrix

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every pair, not a selection")
    arguments = parser.parse_args()
    pairs = list(product(LAYOUTS, LAYOUTS)) if arguments.all else PAIRS
    with tempfile.TemporaryDirectory() as directory:
        found = matrix(Path(directory), pairs)
    wide = max(map(len, LAYOUTS)) + 4
    print(" " * wide, *(f"{number:>2}" for number in range(1, len(LAYOUTS) + 1)))
    for number, source in enumerate(LAYOUTS, 1):
        marks = [{"": " =", None: " ."}.get(found.get((source, target)), " X") for target in LAYOUTS]
        print(f"{number:>2}  {source:<{wide - 4}}", *marks)
    wrong = {pair: text for pair, text in found.items() if text}
    for (source, target), text in wrong.items():
        print(f"{source} -> {target}: {text}")
    print(f"{len(found) - len(wrong)} of {len(found)} pairs: weights and moments bit-equal, next loss to 1e-9.")
    return 3 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

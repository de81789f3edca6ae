"""`python -m tests.matrix` (make matrix): the tests under each way in which torch may compute here, and one table.

python -m tests.matrix                                  # every variation, every test: about ten minutes each
python -m tests.matrix --only avx2 onednn_off           # two of them
python -m tests.matrix --python A/bin/python B/bin/python   # each with every Python given, so with several torch versions
python -m tests.matrix tests/golden tests/gloo/parallel/test_parity.py   # some files; what follows `--` goes to pytest
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}


def _threads(count: int) -> dict[str, str]:
    text = str(count)
    return {
        "SHARDWRIGHT_TEST_THREADS": text,  # of the ranks that tests fork (tests/gloo/ranks.py)
        "OMP_NUM_THREADS": text,  # of the test's own process and of what it starts as a program
        "MKL_NUM_THREADS": text,
        "MKL_DYNAMIC": "FALSE",  # else MKL takes no more threads than there are cores
    }


VARIATIONS: dict[str, dict[str, str]] = {
    "as_it_is": {},
    "avx2": AVX2,
    "no_vectors": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    },
    "onednn_off": {"SHARDWRIGHT_TEST_ONEDNN": "off"},
    "onednn_off_avx2": {"SHARDWRIGHT_TEST_ONEDNN": "off", **AVX2},
    "mkl_compatible": {"MKL_CBWR": "COMPATIBLE"},  # the kernels that MKL takes on a CPU that it does not know
    "1_thread": _threads(1),
    "2_threads": _threads(2),
    "4_threads": _threads(4),
}


@dataclass(frozen=True)
class Row:
    """What one run of the tests came to. error: the end of its output where it never came to a result."""

    variation: str
    torch: str
    passed: int
    failed: tuple[str, ...]
    skipped: int
    seconds: float
    error: str = ""


def cpu_model() -> str:
    """The name of this machine's CPU."""
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found.group(1) if found else "CPU without a name"


def environment(variation: str) -> dict[str, str]:
    """The environment of a run of the tests."""
    paths = [str(ROOT / "tests" / "variation"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, **VARIATIONS[variation], "PYTHONPATH": os.pathsep.join(paths)}


def run(python: str, variation: str, arguments: list[str]) -> Row:
    """One run of pytest with `arguments`."""
    asked = [python, "-c", "from importlib.metadata import version; print(version('torch'))"]
    torch = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="matrix-") as directory:
        result = Path(directory) / "result.xml"
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={result}", *arguments]
        done = subprocess.run(command, cwd=ROOT, env=environment(variation), capture_output=True, text=True)
        seconds = time.monotonic() - start
        if not result.exists():
            return Row(variation, torch, 0, (), 0, seconds, (done.stdout + done.stderr)[-2000:])
        cases = list(ElementTree.parse(result).iter("testcase"))
    failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    names = tuple(f"{case.get('classname')}::{case.get('name')}" for case in failed)
    return Row(variation, torch, len(cases) - len(failed) - skipped, names, skipped, seconds)


def main() -> int:
    """1 where a test failed under any variation."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description="The tests under each variation.")
    parser.add_argument("--only", nargs="+", choices=VARIATIONS, default=list(VARIATIONS), metavar="VARIATION")
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="each with its own torch")
    parser.add_argument("arguments", nargs="*", help="files, and after `--` options of pytest; without: as make test")
    chosen = parser.parse_args()
    arguments = chosen.arguments or ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    print(f"{cpu_model()}, {os.cpu_count()} cores, {' '.join(arguments)}", flush=True)
    print(
        f"{'variation':<16} {'torch':<14} {'passed':>6} {'failed':>6} {'skipped':>7} {'seconds':>7}",
        flush=True,
    )
    rows = []
    for python in chosen.python:
        for variation in chosen.only:
            row = run(python, variation, arguments)
            rows.append(row)
            figures = f"{row.passed:>6} {len(row.failed):>6} {row.skipped:>7} {row.seconds:>7.0f}"
            print(f"{variation:<16} {row.torch:<14} {figures}", *row.failed, sep="\n    ", flush=True)
            if row.error:
                print(f"    no result:\n{row.error}", flush=True)
    return int(any(row.failed or row.error for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())

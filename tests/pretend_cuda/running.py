"""Runs `shardwright` on pretend GPUs, for tests and by hand: `python -m tests.pretend_cuda.running --devices 2 train …`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.places import ROOT
from tests.pretend_cuda.build import build, unavailable

SITE = Path(__file__).resolve().parent / "site"
HOLDS_UP = ("wait", "pageable")
"""Kinds of notes after which the device has nothing to do: a copy from or to memory that is not pinned is one."""
needs_pretend_cuda = pytest.mark.skipif(bool(unavailable()), reason=f"no pretend CUDA device: {unavailable()}")


@dataclass
class Ran:
    """A command that has ended.

    violations: breaches of CUDA's rules, each with its stack. notes: of `train`, by update: (kind, what, stack, count).
    """

    code: int
    output: str
    violations: list[str]
    notes: dict[int, list[tuple[str, str, str, int]]] = field(default_factory=dict)

    def waits(self, update: int) -> int:
        """How often the host waited for the device in one update."""
        return sum(count for kind, _, _, count in self.notes[update] if kind in HOLDS_UP)

    def stacks(self, update: int) -> str:
        return "\n".join(f"{count} x {kind}: {what}\n    {stack}" for kind, what, stack, count in self.notes[update])


@cache
def _built() -> str:
    return str(build())


def environment(devices: int, source: Path | None = None) -> dict[str, str]:
    """The variables with which a Python process has `devices` pretend GPUs. source: of another tree than this one."""
    path = [str(SITE), str(source or ROOT / "src"), str(ROOT)]
    return {
        **os.environ,
        "PRETEND_CUDA": _built(),
        "PRETEND_CUDA_DEVICES": str(devices),
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
    }


def pretend(
    *arguments: str,
    devices: int = 2,
    source: Path | None = None,
    timeout: float = 600,
    more: Mapping[str, str] | None = None,
) -> Ran:
    """`shardwright` with `arguments` on pretend GPUs. more: variables of the environment."""
    return run_on_pretend_gpus(["-m", "shardwright", *arguments], devices, source, timeout, more)


def pretend_ranks(
    module: str, *arguments: str, devices: int = 2, source: Path | None = None, timeout: float = 600
) -> Ran:
    """`python -m module arguments` on one rank for each of `devices` pretend GPUs, started by torchrun."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(devices), "-m", module]
    return run_on_pretend_gpus([*start, *arguments], devices, source, timeout, None)


def run_on_pretend_gpus(
    arguments: Sequence[str], devices: int, source: Path | None, timeout: float, more: Mapping[str, str] | None
) -> Ran:
    """Python with `arguments` on pretend GPUs."""
    command = [sys.executable, *arguments]
    with tempfile.TemporaryDirectory() as directory:
        notes, violations = Path(directory) / "notes.json", Path(directory) / "violations.txt"
        variables = environment(devices, source) | {"PRETEND_CUDA_VIOLATIONS": str(violations), **(more or {})}
        if "train" in arguments:
            variables["PRETEND_CUDA_NOTES"] = str(notes)
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=timeout)
        found: dict[str, Any] = json.loads(notes.read_text()) if notes.exists() else {}
        breaches = violations.read_text().replace("\n    ", " | ").splitlines() if violations.exists() else []
    by_update = {int(update): [tuple(note) for note in told] for update, told in found.items()}
    return Ran(done.returncode, done.stdout + done.stderr, breaches, by_update)  # type: ignore[arg-type]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2)
    given, rest = parser.parse_known_args(arguments)
    if reason := unavailable():
        print(reason)
        return 2
    ran = pretend(*rest, devices=given.devices)
    print(ran.output, end="")
    for update in sorted(ran.notes):
        print(f"update {update}: the host waits {ran.waits(update)} times\n{ran.stacks(update)}")
    print("\n".join(ran.violations) or "No breach of CUDA's rules.")
    return ran.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Runs that tests of saving and loading share: the loop of `train` on two ranks."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console
from tests.gloo.checkpoint.test_state_goes_on import Data, Flag
from tests.gloo.engine import ODD, make_engine, run_file

from shardwright.errors import CheckpointError
from shardwright.train.loop import Trainer

STEPS = 6


def make_trainer(directory: Path, model: str = ODD, **options: Any) -> tuple[Trainer, io.StringIO]:
    values = {"training__max_steps": STEPS, "checkpoint__output_dir": str(directory), **options}
    loaded = run_file(model, **({"checkpoint__save_steps": 2} | values))
    engine, screen = make_engine(loaded), io.StringIO()
    quiet = dist.get_rank() != 0
    console = Console(file=screen, quiet=quiet, width=1000)
    return Trainer(loaded, engine, Data(engine), console), screen  # type: ignore[arg-type]


def train(trainer: Trainer) -> int:
    return trainer.train(Flag(trainer.engine))  # type: ignore[arg-type]


def raised(action: Any) -> str:
    try:
        action()
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("*checkpoint-*"))


def files_of(directory: Path) -> dict[str, str]:
    """Hashes of all tensors' files and indices of a run."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.glob("checkpoint-*/tensors/*"))
    }


def status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))

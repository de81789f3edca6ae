"""What reference and candidate write down of each update, as files: scalars in JSON, tensors in safetensors.

A record is a directory. `update-0.param.safetensors` holds the parameters before the first update; each update N >= 1
has `update-N.json` and one safetensors file per kind of tensor: `grad` (before clipping), `param` (after the step) and one
per optimizer state (`exp_avg`, ...). Names are those of the unsplit model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class MicrobatchNote:
    """Which rows one data rank took as one microbatch, and how many of their labels are targets."""

    rank: int
    index: int
    rows: tuple[int, ...]
    targets: int


@dataclass(frozen=True)
class Scalars:
    """The numbers of one update; the fields below `microbatches` are the candidate's only."""

    target_tokens: int
    loss: float
    grad_norm: float
    clip_coefficient: float
    learning_rate: float
    microbatches: tuple[MicrobatchNote, ...] = ()
    local_norms: tuple[float, ...] = ()
    """By rank, the norm of the rank's part of the gradient."""
    losses: tuple[float, ...] = ()
    """By rank, as reported."""
    grad_norms: tuple[float, ...] = ()
    """By rank, as reported."""
    replica_gap: float = 0.0
    """Largest difference between weights that should be equal on several ranks / largest weight of that parameter."""
    replica_name: str = ""
    """That parameter."""


@dataclass(frozen=True)
class BatchInvariance:
    """Loss sums of the same rows, computed in three ways (see batch_invariance.py)."""

    rows: int
    """Rows of a data rank."""
    together: float
    """In one microbatch."""
    one_by_one: float
    """Each row in its own microbatch."""
    alone: float | None
    """Each document in its own microbatch, without padding; None where that is not possible."""

    def broken_by(self, relative: float) -> str:
        """`neighbours` or `width` where two sums differ by more than `relative`, else empty."""

        def differ(a: float, b: float) -> bool:
            return not abs(a - b) <= relative * max(abs(a), abs(b))

        if differ(self.together, self.one_by_one):
            return "neighbours"
        return "width" if self.alone is not None and differ(self.one_by_one, self.alone) else ""


@dataclass(frozen=True)
class Notes:
    """What the reference knows of the run beside its updates; `diagnose` reads the notes."""

    names: tuple[str, ...]
    """Parameters in the order of the model."""
    optimizer: str
    weight_decay: float
    adam: dict[str, float]
    momentum: float
    no_decay: tuple[str, ...]
    frozen: tuple[str, ...]
    tied: tuple[tuple[str, ...], ...]
    blocks: tuple[str, ...]
    microbatch_targets: tuple[int, ...]
    """Of update 1, by microbatch, as the next two."""
    microbatch_divisors: tuple[float, ...]
    """Sum of the weights of the targets, or the count that the user's own loss returns."""
    microbatch_loss_sums: tuple[float, ...]
    other_counts: dict[str, int]
    """Numbers that are sometimes taken for the target count, by description."""
    other_losses: dict[str, float]
    """Losses of update 1 under mistaken labels, by description."""
    learning_rates: tuple[float, ...]
    """By scheduler step."""


class TensorFile:
    """The tensors of one kind of one update, read one at a time."""

    def __init__(self, path: Path) -> None:
        self._file = safe_open(path, framework="pt")
        self.names: tuple[str, ...] = tuple(self._file.keys())

    def __getitem__(self, name: str) -> Tensor:
        return self._file.get_tensor(name)

    def read(self) -> dict[str, Tensor]:
        """All tensors at once, in float64."""
        return {name: self[name].double() for name in self.names}


class Record:
    """A record's directory, to write or to read."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def updates(self) -> tuple[int, ...]:
        """The numbers of the updates that are complete, from 1."""
        return tuple(sorted(int(path.stem.removeprefix("update-")) for path in self.directory.glob("update-*.json")))

    def kinds(self, update: int) -> tuple[str, ...]:
        """The kinds of tensors of one update: `grad` first, `param` last."""
        found = [path.name.split(".")[1] for path in self.directory.glob(f"update-{update}.*.safetensors")]
        order = {"grad": 0, "param": 2}
        return tuple(sorted(found, key=lambda kind: (order.get(kind, 1), kind)))

    def write_tensors(self, update: int, kind: str, tensors: Mapping[str, Tensor]) -> None:
        whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(whole, self.directory / f"update-{update}.{kind}.safetensors")

    def tensors(self, update: int, kind: str) -> TensorFile:
        return TensorFile(self.directory / f"update-{update}.{kind}.safetensors")

    def write_scalars(self, update: int, scalars: Scalars) -> None:
        self._write(f"update-{update}", scalars)

    def scalars(self, update: int) -> Scalars:
        return self._read(f"update-{update}", Scalars)

    def write_batch_invariance(self, sums: BatchInvariance) -> None:
        self._write("batch-invariance", sums)

    def batch_invariance(self) -> BatchInvariance | None:
        """The loss sums of the candidate's first microbatches; None in a record of the reference."""
        exists = (self.directory / "batch-invariance.json").exists()
        return self._read("batch-invariance", BatchInvariance) if exists else None

    def write_notes(self, notes: Notes) -> None:
        self._write("notes", notes)

    def notes(self) -> Notes:
        return self._read("notes", Notes)

    def write_probe(self, gradients: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Writes the gradients of the loss sums of single microbatches of update 1: {index: {name: gradient}}."""
        flat = {f"{i}/{name}": tensor.contiguous() for i, named in gradients.items() for name, tensor in named.items()}
        save_file(flat, self.directory / "probe.safetensors")

    def probe(self) -> dict[int, dict[str, Tensor]]:
        """What `write_probe` wrote, in float64."""
        result: dict[int, dict[str, Tensor]] = {}
        for key, tensor in TensorFile(self.directory / "probe.safetensors").read().items():
            index, _, name = key.partition("/")
            result.setdefault(int(index), {})[name] = tensor
        return result

    def _write(self, name: str, values: Any) -> None:
        (self.directory / f"{name}.json").write_text(json.dumps(asdict(values)))

    def _read(self, name: str, kind: type[T]) -> T:
        return TypeAdapter(kind).validate_json((self.directory / f"{name}.json").read_bytes())

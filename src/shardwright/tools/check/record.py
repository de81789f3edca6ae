"""What reference and candidate write down of each update, as files: scalars in JSON, tensors in safetensors.

A record is a directory. `update-0.param.safetensors` holds the parameters before the first update; each update N >= 1
has `update-N.json` and one safetensors file per kind of tensor: `grad` (before clipping), `param` (after the step) and one
per optimizer state (`exp_avg`, ...). Names are those of the unsplit model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


@dataclass(frozen=True)
class MicrobatchNote:
    """Which rows one data rank took as one microbatch, and how many of their labels are targets."""

    rank: int
    index: int
    rows: tuple[int, ...]
    targets: int


@dataclass(frozen=True)
class Scalars:
    """The numbers of one update; what stands below `microbatches` is the candidate's only.

    local_norms: the norm of what each rank holds of the gradient. losses, grad_norms: as each rank reports them.
    replica_gap: the largest difference between weights that ranks should hold alike, relative to the largest weight of
    that parameter, `replica_name`.
    """

    target_tokens: int
    loss: float
    grad_norm: float
    clip_coefficient: float
    learning_rate: float
    microbatches: tuple[MicrobatchNote, ...] = ()
    local_norms: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    grad_norms: tuple[float, ...] = ()
    replica_gap: float = 0.0
    replica_name: str = ""

    @staticmethod
    def from_json(data: dict[str, Any]) -> Scalars:
        notes = tuple(
            MicrobatchNote(note["rank"], note["index"], tuple(note["rows"]), note["targets"])
            for note in data["microbatches"]
        )
        lists = {key: tuple(value) for key, value in data.items() if isinstance(value, list)}
        return Scalars(**{**data, **lists, "microbatches": notes})


@dataclass(frozen=True)
class Company:
    """Loss sums of one microbatch of every data rank, of as many `rows`, computed in three ways (see company.py).

    alone: None where documents cannot be run without padding.
    """

    rows: int
    together: float
    one_by_one: float
    alone: float | None

    def matters(self, relative: float) -> str:
        """What the loss depends on, `neighbours` or `width`: the sums differ by more than `relative`. Else nothing."""
        if _differ(self.together, self.one_by_one, relative):
            return "neighbours"
        return "width" if self.alone is not None and _differ(self.one_by_one, self.alone, relative) else ""


def _differ(a: float, b: float, relative: float) -> bool:
    return not abs(a - b) <= relative * max(abs(a), abs(b))


@dataclass(frozen=True)
class Notes:
    """What the reference knows of the run beyond its updates; `diagnose` reads it.

    names: of the parameters in the model's order. microbatch_targets, microbatch_divisors, microbatch_loss_sums: of
    update 1, by microbatch index; divisors are the sums of the weights of targets, or what the user's own loss counts.
    other_counts: numbers that are sometimes mistaken for the target count. other_losses: losses of update 1 under
    mistaken labels. learning_rates: by scheduler step.
    """

    names: tuple[str, ...]
    optimizer: str
    weight_decay: float
    adam: dict[str, float]
    momentum: float
    no_decay: tuple[str, ...]
    frozen: tuple[str, ...]
    tied: tuple[tuple[str, ...], ...]
    blocks: tuple[str, ...]
    microbatch_targets: tuple[int, ...]
    microbatch_divisors: tuple[float, ...]
    microbatch_loss_sums: tuple[float, ...]
    other_counts: dict[str, int]
    other_losses: dict[str, float]
    learning_rates: tuple[float, ...]
    lines: tuple[str, ...] = field(default=())

    @staticmethod
    def from_json(data: dict[str, Any]) -> Notes:
        fixed: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        return Notes(**{**fixed, "tied": tuple(tuple(group) for group in data["tied"])})


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

    def write_tensors(self, update: int, kind: str, tensors: Mapping[str, Tensor]) -> None:
        whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(whole, self.directory / f"update-{update}.{kind}.safetensors")

    def write_scalars(self, update: int, scalars: Scalars) -> None:
        (self.directory / f"update-{update}.json").write_text(json.dumps(asdict(scalars)))

    def write_company(self, company: Company) -> None:
        (self.directory / "company.json").write_text(json.dumps(asdict(company)))

    def company(self) -> Company | None:
        """What the candidate found of its first microbatch; None in a record of the reference."""
        path = self.directory / "company.json"
        return Company(**json.loads(path.read_text())) if path.exists() else None

    def write_notes(self, notes: Notes) -> None:
        (self.directory / "notes.json").write_text(json.dumps(asdict(notes)))

    def updates(self) -> tuple[int, ...]:
        """The numbers of the updates that are complete, from 1."""
        return tuple(sorted(int(path.stem.removeprefix("update-")) for path in self.directory.glob("update-*.json")))

    def kinds(self, update: int) -> tuple[str, ...]:
        """The kinds of tensors of one update: `grad` first, `param` last."""
        found = [path.name.split(".")[1] for path in self.directory.glob(f"update-{update}.*.safetensors")]
        order = {"grad": 0, "param": 2}
        return tuple(sorted(found, key=lambda kind: (order.get(kind, 1), kind)))

    def tensors(self, update: int, kind: str) -> TensorFile:
        return TensorFile(self.directory / f"update-{update}.{kind}.safetensors")

    def scalars(self, update: int) -> Scalars:
        return Scalars.from_json(json.loads((self.directory / f"update-{update}.json").read_text()))

    def notes(self) -> Notes:
        return Notes.from_json(json.loads((self.directory / "notes.json").read_text()))

    def write_probe(self, gradients: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Sum-gradients of single microbatches of update 1 (not divided by anything): {index: {name: gradient}}."""
        flat = {
            f"{index}/{name}": tensor.contiguous()
            for index, named in gradients.items()
            for name, tensor in named.items()
        }
        save_file(flat, self.directory / "probe.safetensors")

    def probe(self) -> dict[int, dict[str, Tensor]]:
        file = TensorFile(self.directory / "probe.safetensors")
        result: dict[int, dict[str, Tensor]] = {}
        for key in file.names:
            index, _, name = key.partition("/")
            result.setdefault(int(index), {})[name] = file[key].to(torch.float64)
        return result

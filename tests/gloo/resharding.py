"""Every layout reads every other's checkpoint: saved by some ranks, loaded by others, compared bit for bit.

The oracle gathers whole tensors with `DTensor.full_tensor` and point-to-point messages and hashes their bytes; it shares
nothing with the store. A loading engine is filled with other values first.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests import tolerance
from tests.gloo.engine import (
    QWEN3,
    SMALL,
    T,
    batches_for,
    make_engine,
    run_file,
)
from tests.gloo.pipelines import moments, weights
from tests.gloo.ranks import run_ranks
from torch import Tensor

from shardwright.checkpoint.manifest import Manifest
from shardwright.checkpoint.restore import current_state, restore
from shardwright.checkpoint.saver import save
from shardwright.config.load import Loaded
from shardwright.layout.names import parse_layout
from shardwright.train.update import UpdateEngine

LAYOUTS: dict[str, int] = {
    "zero3 on 1": 1,
    "ddp": 2, "zero1": 2, "zero2": 2, "zero3": 2, "tp2": 2, "pp2": 2, "pp2:interleaved_1f1b": 2, "pp2:zbv+ddp": 2,
    "cp2+zero3": 2, "cp2+ddp": 2,
    "zero3 on 3": 3, "ddp on 3": 3,
    "zero3 on 4": 4, "hsdp2": 4, "tp2+zero3": 4, "tp2+zero1": 4, "tp2+ddp": 4, "tp2+pp2": 4, "pp2+zero3": 4,
    "cp2+zero2": 4, "tp4": 4,
}  # fmt: skip
"""Name -> ranks. Embedding and head are tied, and 257 rows of them are divided evenly by none."""
PAIRS = [
    ("zero3", "zero3 on 1"), ("zero3 on 1", "tp2+zero3"), ("tp2+zero3", "zero3 on 3"), ("zero3 on 3", "hsdp2"),
    ("hsdp2", "pp2"), ("pp2", "tp2"), ("tp2", "cp2+zero3"), ("cp2+zero3", "pp2:interleaved_1f1b"),
    ("pp2:interleaved_1f1b", "tp2+pp2"), ("tp2+pp2", "zero2"), ("zero2", "pp2+zero3"), ("pp2+zero3", "zero1"),
    ("zero1", "tp2+ddp"), ("tp2+ddp", "ddp"), ("ddp", "tp2+zero1"), ("pp2:zbv+ddp", "tp2+zero3"), ("tp2+zero3", "tp2+zero1"),
]  # fmt: skip
ROWS, LENGTH, UPDATES = 12, 16, 2
Digests = dict[str, str]


@dataclass
class Saved:
    """A checkpoint, the hashes of its whole tensors, and the loss of the update behind it."""

    path: Path
    digests: Digests
    loss: float


def loaded_for(layout: str) -> Loaded:
    """The run file of a layout."""
    kinds = parse_layout(layout.split(" on ")[0])
    return run_file(
        QWEN3,
        model__config_overrides={
            **SMALL[QWEN3],
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
        },
        training__global_batch_size=ROWS,
        training__max_steps=UPDATES,
        data__max_length=LENGTH,
        **{f"parallelism__{key}": value for key, value in kinds.items()},
    )


def digests(engine: UpdateEngine) -> Digests:
    """A hash of every whole weight and moment, on rank 0."""
    found = weights(engine)
    found |= {f"{name}/{key}": v for name, entries in moments(engine).items() for key, v in entries.items()}
    return {name: _hash(value) for name, value in found.items()}


def _hash(value: Tensor) -> str:
    shape = f"{tuple(value.shape)} {value.dtype}".encode()
    return hashlib.sha256(shape + value.contiguous().numpy().tobytes()).hexdigest()


def _update(engine: UpdateEngine, update: int) -> float:
    engine.forward_backward(batches_for(engine, update, rows=ROWS, length=LENGTH))
    return engine.step().loss


def _saved(directory: Path, layouts: list[str]) -> dict[str, Saved]:
    found = {}
    for layout in layouts:
        torch.manual_seed(dist.get_rank())
        engine = make_engine(loaded_for(layout))
        for update in range(UPDATES - 1):
            _update(engine, update)
        state = current_state(engine.module, engine.optimizer, engine.params)
        manifest = Manifest(UPDATES - 1, 0, "", "", dist.get_world_size(), layout, "")
        path = save(directory / layout.replace(" ", "-"), state, manifest, "", None)
        found[layout] = Saved(path, digests(engine), _update(engine, UPDATES - 1))
    return found


def _read(sources: dict[str, Saved], pairs: list[tuple[str, str]], continued: bool) -> dict[tuple[str, str], str]:
    found = {}
    for target in dict.fromkeys(target for _, target in pairs):
        engine = make_engine(loaded_for(target))
        ids = sorted(row for m in batches_for(engine, 9, rows=ROWS).microbatches for row in m.row_ids)
        for source in [s for s, t in pairs if t == target]:
            found[source, target] = _compared(engine, sources[source], continued)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, ids)
        if sorted({row for rows in everyone for row in rows}) != list(range(ROWS)):
            found[target, target] = "the ranks together hold other rows"
    return found


def _compared(engine: UpdateEngine, source: Saved, continued: bool) -> str:
    """What differs after loading `source`; empty when nothing does. On rank 0."""
    with torch.no_grad():
        for p in engine.module.parameters():
            p.fill_(7.0)
    restore(source.path, engine.module, engine.optimizer, engine.params)
    here = digests(engine)
    if dist.get_rank() == 0 and here != source.digests:
        wrong = [name for name in here | source.digests if here.get(name) != source.digests.get(name)]
        return f"{len(wrong)} of {len(here)} differ: {wrong[0]}"
    if continued:
        loss = _update(engine, UPDATES - 1)
        shapes, tokens = dict(engine.module.named_parameters()), ROWS * T
        if abs(loss / source.loss - 1) > tolerance.LATER * tolerance.of_model(shapes, tokens):
            return f"next loss {loss} where {source.loss} is right"
    return ""


def matrix(directory: Path, pairs: list[tuple[str, str]], continued: bool = True) -> dict[tuple[str, str], str]:
    """(saved, loaded) -> what differs. Starts ranks twice for each number of them."""
    sources: dict[str, Saved] = {}
    names = dict.fromkeys(source for source, _ in pairs)
    for ranks in (1, 2, 3, 4):
        if layouts := [name for name in names if LAYOUTS[name] == ranks]:
            sources |= run_ranks(_saved, ranks, directory, layouts)[0]
    found: dict[tuple[str, str], str] = {}
    for ranks in (1, 2, 3, 4):
        if chosen := [pair for pair in pairs if LAYOUTS[pair[1]] == ranks]:
            found |= run_ranks(_read, ranks, sources, chosen, continued)[0]
    return found

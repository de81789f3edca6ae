"""Batch invariance: the loss of a row must not depend on the other rows of its microbatch, nor on the padding at its end.

Reference and candidate have the same microbatches. So a model that mixes rows (statistics over a batch, experts that are full)
gives the same numbers to both. Here the engine is compared with itself: a microbatch as the run has it, its rows one by one,
and its documents alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.attention.packed_rows import PackedRows
from shardwright.data.loader import Microbatch, UpdateBatch
from shardwright.layout.loss import IGNORE_INDEX
from shardwright.layout.size_rules import row_multiple
from shardwright.models.dropout import silence_dropout
from shardwright.models.model_parts import is_transformers
from shardwright.tools.check.record import BatchInvariance
from shardwright.train.update import UpdateEngine

FILL = {"input_ids": 0, "labels": IGNORE_INDEX, "documents": -1, "weights": 0}
"""The tensors [rows, tokens] of a microbatch, and the value of padding in each."""


@torch.no_grad()
def batch_invariance(engine: UpdateEngine, batch: UpdateBatch) -> BatchInvariance:
    """Runs some rows of `batch` in three ways; dropout of the model is off from then on. Collective."""
    microbatch = _of_unequal_rows(batch.microbatches)
    silence_dropout(engine.module)
    engine.module.train()  # batch statistics as in training
    count = len(microbatch.input_ids)
    rows = [_changed(microbatch, lambda t, _, own=slice(row, row + 1): t[own], row) for row in range(count)]
    sums = [engine.loss_sum(microbatch), torch.stack([engine.loss_sum(row) for row in rows]).sum()]
    known = microbatch.documents is not None or microbatch.lengths is not None
    documents = list(_documents(microbatch, row_multiple(engine.run, engine.axes))) if known else []
    # a module of a user's own may take padding for part of its input
    trimmed = known and (is_transformers(engine.module) or engine.run.data.batching != "pad")
    if trimmed:
        most = torch.tensor(len(documents), device=engine.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)  # all ranks take part in every forward, so all need as many
        filler = _document(microbatch, 0, 0, 0, documents[0].input_ids.shape[1])
        documents += [filler] * (int(most) - len(documents))
        sums.append(torch.stack([engine.loss_sum(document) for document in documents]).sum())
    engine.strategy.release()
    agreed = torch.stack(sums).double() * engine.counts_loss
    dist.all_reduce(agreed)
    together, one_by_one, *alone = agreed.tolist()
    return BatchInvariance(len(rows), together, one_by_one, alone[0] if alone else None)


def _changed(microbatch: Microbatch, change: Callable[..., Tensor], row: int, length: int | None = None) -> Microbatch:
    """One row of a microbatch: each of its tensors as `change(tensor, fill value)`; length: None for the row's own."""
    changed: dict[str, Any] = {
        name: change(value, fill) for name, fill in FILL.items() if (value := getattr(microbatch, name)) is not None
    }
    lengths = microbatch.lengths and microbatch.lengths[row : row + 1]
    return replace(
        microbatch,
        **changed,
        row_ids=microbatch.row_ids[row : row + 1],
        lengths=lengths if length is None else (length,),
    )


def _of_unequal_rows(microbatches: Sequence[Microbatch]) -> Microbatch:
    """The microbatches with the shortest and the longest row as one; equal rows would show no dependence on padding."""
    if len(microbatches) < 2:
        return microbatches[0]
    by_length = sorted(microbatches, key=lambda m: min(filter(None, m.lengths or ()), default=0))
    both = max(by_length[1:], key=lambda m: max(m.lengths or (0,))), by_length[0]
    width = max(m.input_ids.shape[1] for m in both)
    joined: dict[str, Any] = {
        name: torch.cat([torch.nn.functional.pad(own, (0, width - own.shape[1]), value=fill) for own in parts])
        for name, fill in FILL.items()
        if None not in (parts := [getattr(m, name) for m in both])
    }
    lengths = [m.lengths for m in both if m.lengths is not None]
    return replace(
        both[0],
        **{**dict.fromkeys(FILL), **joined},
        row_ids=sum((m.row_ids for m in both), ()),
        lengths=sum(lengths, ()) if len(lengths) == len(both) else None,
    )


def _documents(microbatch: Microbatch, multiple: int) -> Iterator[Microbatch]:
    """Each document in a row of its own, as short as the layout allows; a row of padding where there is no document."""
    width, numbers = microbatch.input_ids.shape[1], microbatch.documents
    spans = [(row, 0, length) for row, length in enumerate(microbatch.lengths or ()) if length]
    if numbers is not None:
        spans = list(PackedRows(numbers, torch.device("cpu")).spans)
    for row, start, end in spans or [(0, 0, 0)]:
        short = max(1, -(-(end - start) // multiple)) * multiple
        yield _document(microbatch, row, start, end, min(width, short))


def _document(microbatch: Microbatch, row: int, start: int, end: int, width: int) -> Microbatch:
    """The tokens [start, end) of a row as a row of `width`."""

    def cut(source: Tensor, fill: float) -> Tensor:
        own = source[row : row + 1, start:end]
        return torch.nn.functional.pad(own, (0, width - own.shape[1]), value=fill)

    return _changed(microbatch, cut, row, end - start)

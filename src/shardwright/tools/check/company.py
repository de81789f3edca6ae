"""Whether the loss of a row depends on the other rows of its microbatch, or on the padding at its end.

Reference and candidate have the same microbatches. So a model that mixes rows (statistics over a batch, experts that are full)
gives the same numbers to both. Here the engine is compared with itself: a microbatch as the run has it, its rows one by one,
and its documents alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.attention.packed_rows import PackedRows
from shardwright.data.loader import Microbatch, UpdateBatch
from shardwright.layout.loss import IGNORE_INDEX
from shardwright.layout.size_rules import row_multiple
from shardwright.models.model_parts import is_transformers
from shardwright.tools.check.changes import silence_dropout
from shardwright.tools.check.record import Company
from shardwright.train.update import Engine


@torch.no_grad()
def company(engine: Engine, batch: UpdateBatch) -> Company:
    """Runs some rows of `batch` in three ways; dropout of the model is off from then on. Collective."""
    microbatch = _of_unequal_rows(batch.microbatches)
    silence_dropout(engine.module)
    engine.module.train()  # statistics over a batch are those of training
    rows = list(_rows(microbatch))
    sums = [engine.loss_sum(microbatch), torch.stack([engine.loss_sum(row) for row in rows]).sum()]
    known = microbatch.documents is not None or microbatch.lengths is not None
    documents = list(_documents(microbatch, row_multiple(engine.run, engine.axes))) if known else []
    # a module of a user's own may take padding for part of its input
    trimmed = known and (is_transformers(engine.module) or engine.run.data.batching != "pad")
    if trimmed:
        most = torch.tensor(len(documents), device=engine.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)  # each forward is one of all ranks
        filler = _cut(microbatch, slice(0, 1), 0, 0, documents[0].input_ids.shape[1])
        documents += [filler] * (int(most) - len(documents))
        sums.append(torch.stack([engine.loss_sum(document) for document in documents]).sum())
    engine.parallel.release()
    agreed = torch.stack(sums).double() * engine._counts_loss
    dist.all_reduce(agreed)
    together, one_by_one, *alone = agreed.tolist()
    return Company(len(rows), together, one_by_one, alone[0] if alone else None)


def _of_unequal_rows(microbatches: Sequence[Microbatch]) -> Microbatch:
    """The two microbatches with the shortest and the longest row as one; equal rows would show no dependence on padding."""
    if len(microbatches) < 2:
        return microbatches[0]
    by_length = sorted(microbatches, key=lambda m: min(filter(None, m.lengths or ()), default=0))
    shortest, longest = by_length[0], max(by_length[1:], key=lambda m: max(m.lengths or (0,)))
    return _joined(longest, shortest)


def _joined(*microbatches: Microbatch) -> Microbatch:
    """One microbatch of the rows of several, as wide as the widest."""
    width = max(m.input_ids.shape[1] for m in microbatches)
    wide = [_cut(m, slice(None), 0, m.input_ids.shape[1], width) for m in microbatches]

    def all_of(parts: list[Tensor | None]) -> Tensor | None:
        return torch.cat([p for p in parts if p is not None]) if None not in parts else None

    lengths = [m.lengths for m in microbatches if m.lengths is not None]
    return replace(
        wide[0],
        input_ids=torch.cat([m.input_ids for m in wide]),
        labels=torch.cat([m.labels for m in wide]),
        row_ids=sum((m.row_ids for m in microbatches), ()),
        documents=all_of([m.documents for m in wide]),
        weights=all_of([m.weights for m in wide]),
        lengths=sum(lengths, ()) if len(lengths) == len(microbatches) else None,
    )


def _rows(microbatch: Microbatch) -> Iterator[Microbatch]:
    for row in range(len(microbatch.input_ids)):
        own = slice(row, row + 1)
        yield replace(
            microbatch,
            input_ids=microbatch.input_ids[own],
            labels=microbatch.labels[own],
            row_ids=microbatch.row_ids[own],
            documents=None if microbatch.documents is None else microbatch.documents[own],
            weights=None if microbatch.weights is None else microbatch.weights[own],
            lengths=None if microbatch.lengths is None else microbatch.lengths[own],
        )


def _documents(microbatch: Microbatch, multiple: int) -> Iterator[Microbatch]:
    """Each document in a row of its own, as short as the layout allows; one of padding where there is none."""
    width, numbers = microbatch.input_ids.shape[1], microbatch.documents
    spans = [(row, 0, length) for row, length in enumerate(microbatch.lengths or ()) if length]
    if numbers is not None:
        spans = list(PackedRows(numbers, torch.device("cpu")).spans)
    for row, start, end in spans or [(0, 0, 0)]:
        short = max(1, -(-(end - start) // multiple)) * multiple
        yield _cut(microbatch, slice(row, row + 1), start, end, min(width, short))


def _cut(microbatch: Microbatch, rows: slice, start: int, end: int, width: int) -> Microbatch:
    """The tokens [start, end) of some rows as rows of `width`."""

    def cut(source: Tensor, rest: float) -> Tensor:
        own = source[rows]
        result = own.new_full((len(own), width), rest)
        result[:, : end - start] = own[:, start:end]
        return result

    numbers, weights = microbatch.documents, microbatch.weights
    ids = cut(microbatch.input_ids, 0)
    return replace(
        microbatch,
        input_ids=ids,
        labels=cut(microbatch.labels, IGNORE_INDEX),
        row_ids=microbatch.row_ids[rows],
        documents=None if numbers is None else cut(numbers, -1),
        weights=None if weights is None else cut(weights, 0),
        lengths=(end - start,) * len(ids),
    )

"""Documents run alone, without padding: the right logits of packed and bucketed rows, and the losses of faults in isolation.

B rows of T positions, V vocabulary. Written without the code that it checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from shardwright.data.loader import Microbatch, UpdateBatch
from shardwright.layout.loss import IGNORE_INDEX

Logits = Callable[..., Tensor]
"""(ids [rows, tokens], keyword arguments of the model) -> [rows, tokens, V]."""

Span = tuple[int, int, int]
"""Row, first token, end."""


def spans(microbatch: Microbatch) -> list[Span]:
    """The place of each document. Without document numbers a row is one, of its length or to a token behind its last target."""
    found: list[Span] = []
    if microbatch.documents is None and microbatch.lengths is not None:
        return [(row, 0, length) for row, length in enumerate(microbatch.lengths) if length]
    for row, labels in enumerate(microbatch.labels.tolist()):
        if microbatch.documents is None:
            last = max((t for t, label in enumerate(labels) if label != IGNORE_INDEX), default=-1)
            if last >= 0:
                found.append((row, 0, min(last + 2, len(labels))))
            continue
        numbers = microbatch.documents[row].tolist()
        for number in sorted({n for n in numbers if n >= 0}):
            first = numbers.index(number)
            found.append((row, first, first + numbers.count(number)))
    return found


def targets_inside(batch: UpdateBatch) -> UpdateBatch:
    """`batch` with no target for the last token of a document, whatever the loader made."""
    microbatches = []
    for microbatch in batch.microbatches:
        labels = microbatch.labels.clone()
        for row, _, end in spans(microbatch) if microbatch.documents is not None else ():
            labels[row, end - 1] = IGNORE_INDEX
        microbatches.append(replace(microbatch, labels=labels))
    return replace(batch, microbatches=tuple(microbatches))


def alone(microbatch: Microbatch, logits: Logits, run_on: bool = False) -> Tensor:
    """[B, T, V]: the logits of each document run by itself; 0 where there is no document.

    run_on: positions go on from the document before, as under a fault.
    """
    ids, found = microbatch.input_ids, spans(microbatch)
    if not found:
        return logits(ids)
    rows: list[list[Tensor]] = [[] for _ in ids]
    for row, start, end in found:
        told = {"position_ids": torch.arange(start, end).unsqueeze(0)} if run_on else {}
        rows[row].append(logits(ids[row : row + 1, start:end], **told)[0])
    some, width = next(own[0] for own in rows if own), ids.shape[1]
    padding = [some.new_zeros((width - sum(map(len, own)), some.shape[1])) for own in rows]
    return torch.stack([torch.cat([*own, rest]) for own, rest in zip(rows, padding)])


def across(microbatch: Microbatch) -> Tensor:
    """`microbatch.labels` [B, T] with the next document's first token as the target of each document's last."""
    labels, ids = microbatch.labels.clone(), microbatch.input_ids
    starts = {(row, start): ids[row, start] for row, start, _ in spans(microbatch)}
    for row, _, end in spans(microbatch):
        if (row, end) in starts:
            labels[row, end - 1] = starts[row, end]
    return labels


def _together(microbatch: Microbatch, logits: Logits, run_on: bool) -> Tensor:
    """[B, T, V]: logits of rows whose documents see the documents before them."""
    ids = microbatch.input_ids
    positions = torch.arange(ids.shape[1]).repeat(len(ids), 1)
    if not run_on:
        for row, start, end in spans(microbatch):
            positions[row, start:end] -= start
    # without a mask, Transformers (5.24) takes restarting positions for packed rows and separates the documents
    return logits(ids, position_ids=positions, attention_mask=torch.ones_like(ids))


def _loss(logits: Tensor, labels: Tensor, weights: Tensor | None) -> float:
    each = nn.functional.cross_entropy(
        logits.double().flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
    )
    return (each if weights is None else each * weights.double().flatten()).sum().item()


def target_weight(microbatch: Microbatch, labels: Tensor) -> float:
    """The sum of the weights of the targets in `labels` of a microbatch."""
    targets = labels != IGNORE_INDEX
    return float(targets.sum() if microbatch.weights is None else microbatch.weights.double()[targets].sum())


def mistaken_losses(
    batch: UpdateBatch, logits: Logits, longest: int | None, divisor: float
) -> Iterator[tuple[str, float]]:
    """(words, loss) of the faults of isolation in packed rows; nothing for rows of one document.

    longest: number of positions of the model, None where there is no limit.
    """
    packed = [m for m in batch.microbatches if m.documents is not None]
    if not packed:
        return
    crossing = sum(_loss(alone(m, logits), across(m), m.weights) for m in packed)
    own = sum(target_weight(m, across(m)) for m in packed)
    yield "targets across boundaries", crossing / divisor
    yield f"targets across boundaries, divided by their own {own:g}", crossing / own

    def loss(of: Callable[[Microbatch, Logits, bool], Tensor], run_on: bool) -> float:
        return sum(_loss(of(m, logits, run_on), m.labels, m.weights) for m in packed) / divisor

    yield "documents that see each other", loss(_together, False)
    if longest is None or packed[0].input_ids.shape[1] <= longest:
        yield "documents that see each other and positions that run on", loss(_together, True)
        yield "positions that run on", loss(alone, True)

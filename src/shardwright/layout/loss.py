"""When the loss is computed in chunks of tokens, and how large the chunks are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwright.backends.facts import backend_facts
from shardwright.layout.axes import Axes
from shardwright.layout.combinations import SPLIT_BACKWARD

if TYPE_CHECKING:  # the planner reads this and loads no pydantic
    from shardwright.config.schema import RunFile

CROSS_ENTROPY = "cross_entropy"
IGNORE_INDEX = -100
"""The label of a position without a target: torch's and Transformers' own."""

WORTHWHILE = 4
"""`auto` computes the loss in chunks from so many chunks on: below, whole logits are no peak of memory."""


def chunk_bytes(device: str, dtype: str) -> int:
    """Bytes of fp32 logits in a chunk on a device of this kind; dtype: of compute."""
    facts = backend_facts(device)
    return facts.chunk_bytes_bf16 if dtype == "bf16" else facts.chunk_bytes


def worthwhile(logits: float, packed: bool, device: str, dtype: str) -> bool:
    """Whether `auto` computes a loss over so many logits in chunks. packed: several documents stand in a row."""
    if packed and backend_facts(device).packed_in_chunks:
        return True
    return 4 * logits >= WORTHWHILE * chunk_bytes(device, dtype)


def loss_chunk_tokens(vocabulary: int, device: str, dtype: str) -> int:
    """Tokens of a chunk of logits over `vocabulary` rows on a device of this kind; dtype: of compute."""
    tokens = chunk_bytes(device, dtype) // (4 * vocabulary)
    return max(64, tokens // 64 * 64)


def chunk_tokens(run: RunFile, axes: Axes, vocabulary: int, device: str) -> int:
    """Tokens of a chunk in this run, 0 for whole logits; `vocabulary` is that of the unsplit model."""
    asked = run.memory.loss_chunk_tokens
    if asked != "auto":
        return asked
    if run.training.loss != CROSS_ENTROPY or (axes.pp > 1 and run.parallelism.pp_schedule in SPLIT_BACKWARD):
        return 0
    local, t = -(-vocabulary // axes.tp), run.training
    rows = max(t.per_device_train_batch_size, t.per_device_eval_batch_size or 0)
    logits = rows * run.data.max_length // axes.cp * local
    packed, dtype = run.data.batching == "pack", run.precision.param_dtype
    return loss_chunk_tokens(local, device, dtype) if worthwhile(logits, packed, device, dtype) else 0

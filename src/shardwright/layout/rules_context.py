"""Which tokens of a row a context-parallel rank holds, and what context parallelism refuses of a run file."""

from __future__ import annotations

from shardwright.config.schema import RunFile
from shardwright.errors import ConfigError
from shardwright.layout.axes import Axes


def chunks(length: int, cp: int, cp_rank: int, balanced: bool) -> tuple[range, ...]:
    """The positions of a row of `length` tokens that rank `cp_rank` of `cp` holds, as ranges in ascending order.

    balanced: of 2 cp equal chunks, chunk cp_rank from the head and chunk 2 cp - 1 - cp_rank from the tail, so that under a
    causal mask every rank has the same work (Llama 3, arXiv:2407.21783, section 3.3.2). Otherwise one contiguous part.
    """
    parts = 2 * cp if balanced else cp
    size, rest = divmod(length, parts)
    if rest:
        raise ValueError(f"a row of {length} tokens does not divide into {parts} chunks")
    numbers = (cp_rank, 2 * cp - 1 - cp_rank) if balanced else (cp_rank,)
    return tuple(range(number * size, (number + 1) * size) for number in numbers)


def is_balanced(run: RunFile) -> bool:
    """Whether rows are split into head and tail chunks: the default."""
    return run.parallelism.cp_load_balance is not False


def check_context(run: RunFile, axes: Axes) -> None:
    """Raises `ConfigError` for what context parallelism cannot split."""
    if axes.cp == 1:
        return
    length, cp = run.data.max_length, axes.cp
    parts = 2 * cp if is_balanced(run) else cp
    if length % parts:
        why = (
            f"Each of {cp} ranks holds one chunk from the head and one from the tail of a row: {parts} equal chunks."
            if is_balanced(run)
            else f"Each of {cp} ranks holds an equal part of a row."
        )
        below, above = length // parts * parts, -(-length // parts) * parts
        near = f"{below} or {above}" if below else str(above)
        name = "2 x cp_size" if is_balanced(run) else "cp_size"
        raise ConfigError(
            f"max_length = {length} is not divisible by {name} = {parts}.",
            why,
            f"Set data.max_length to {near}. Rows are padded to max_length, and padding has no target.",
        )

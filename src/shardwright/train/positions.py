"""Compares row lengths with the positions of a model: an error where a table is too short, a notice beyond its training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from shardwright.config.schema import RunFile
from shardwright.data.streaming.rows import StreamTable
from shardwright.data.table import Table
from shardwright.errors import ConfigError
from shardwright.layout.axes import model_axes
from shardwright.layout.size_rules import row_multiple
from shardwright.models.model_parts import is_transformers
from shardwright.models.position_tables import position_tables


def check_positions(model: nn.Module, run: RunFile, tables: Iterable[Table | StreamTable]) -> list[str]:
    """Notices about the positions that the rows in `tables` need of `model` (on meta).

    Raises `ConfigError` where a table of the model that positions index is shorter than the rows: a padded row indexes the
    table over its whole width; packed rows number each document from 0.
    """
    longest = run.data.max_length  # of a stream, the most that its documents may have
    if not run.data.streaming:
        longest = max(table.longest_piece for table in tables if isinstance(table, Table))
    needed, what = longest, "Documents have up to"
    if run.data.batching == "pad":
        needed, what = run.data.max_length, "data.batching pad makes every row"
    elif run.data.batching == "bucket":
        p = run.parallelism
        multiple = row_multiple(run, model_axes(p))
        needed = -(-longest // multiple) * multiple
        what = "data.batching bucket makes the widest row"
    for table in position_tables(model):
        if needed > table.positions:
            raise ConfigError(
                f"`{table.name}` of {type(model).__name__} has {table.positions} positions. {what} {needed} tokens.",
                "A position past the end of the table is an index error.",
                f"Set data.max_length to at most {table.positions}, or take a model with more positions.",
            )
    return _beyond_training(model, longest)


def _beyond_training(model: nn.Module, longest: int) -> list[str]:
    """The notice about documents beyond max_position_embeddings, for rotary positions alone, which do not end."""
    if not is_transformers(model) or not any(
        "inv_freq" in name.rpartition(".")[2] for name, _ in model.named_buffers()
    ):
        return []
    config: Any = model.config
    trained = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(trained, int) or longest <= trained:
        return []
    return [
        f"Documents have up to {longest} tokens; {type(model).__name__} was made for {trained} "
        "(max_position_embeddings). Rotary positions continue past that length, but the model was not trained there."
    ]

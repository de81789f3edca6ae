"""`shardwright inspect`: samples as the model sees them, lengths, and what each way of batching makes of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from rich.console import Console

from shardwright.config.load import Loaded
from shardwright.console import say
from shardwright.data.order import FILLER, Int64
from shardwright.data.prepare import Prepared, prepare
from shardwright.data.updates import make_order
from shardwright.errors import ConfigError, DataError, ExitCode
from shardwright.layout.legality import check_settings
from shardwright.tools.inspect.batches import MODES, Batching, measure
from shardwright.tools.inspect.sample import Decoder, Sample, read_sample
from shardwright.tools.inspect.show import attended_length, batching_lines, bins, histogram_lines, legend, sample_lines


def run_inspect(
    loaded: Loaded, console: Console, *, samples: int = 3, row: int | None = None, as_json: bool = False
) -> int:
    """Prints the report on `console` and returns the exit code. row: show this row only.

    Raises `ConfigError` for a row that is not there.
    """
    check_settings(loaded)
    run = loaded.run
    prepared = prepare(run)
    if prepared is None:
        raise DataError("data.train names no files.")
    rows = [row] if row is not None else first_rows(loaded, prepared, samples)
    if row is not None and not 0 <= row < len(prepared.table):
        raise ConfigError(f"There is no row {row}.", f"Rows are 0 to {len(prepared.table) - 1:,}.")
    decoder = Decoder(prepared.tokenizer_path)
    bucketed = run.data.batching == "bucket"
    shown = [read_sample(prepared, number, decoder, bucketed) for number in rows]
    documents = prepared.table.documents
    lengths = np.diff(np.asarray(documents.ends[:, 0]), prepend=0).astype(np.int64)
    found = [measure(run, prepared, mode) for mode in MODES] if row is None else []
    if as_json:
        console.file.write(json.dumps(_report(prepared, shown, lengths, found), indent=1) + "\n")
        return ExitCode.DONE
    colour = console.is_terminal and not console.no_color
    if row is None:
        for line in _facts(prepared, lengths, found, run.data.batching):
            say(console, line)
        console.print()
    console.print(legend(colour), soft_wrap=True)
    for sample in shown:
        for text in sample_lines(sample, colour):
            console.print(text, soft_wrap=True)
    return ExitCode.DONE


def first_rows(loaded: Loaded, prepared: Prepared, samples: int) -> list[int]:
    """The first `samples` rows of training, in the order in which they are trained on."""
    order, rows = make_order(loaded.run, prepared), []
    for update in range(order.total_updates):
        rows += [row for row in order.update_rows(update).tolist() if row != FILLER]
        if len(rows) >= samples:
            break
    return rows[:samples]


def _facts(prepared: Prepared, lengths: Int64, found: list[Batching], chosen: str) -> Iterator[str]:
    yield prepared.summary()
    yield from prepared.notices
    yield ""
    yield from histogram_lines(lengths, prepared.table.max_length)
    yield ""
    yield from batching_lines(found, chosen)


def _report(prepared: Prepared, shown: list[Sample], lengths: Int64, found: list[Batching]) -> dict[str, Any]:
    return {
        "summary": prepared.summary(),
        "notices": list(prepared.notices),
        "formats": list(prepared.formats),
        "counts": prepared.counts,
        "lengths": [
            {"from": low, "to": high, "documents": count}
            for low, high, count in bins(lengths, prepared.table.max_length)
        ],
        "document_length": attended_length(lengths, prepared.table.max_length),
        "batching": [batching.to_json() for batching in found],
        "samples": [sample.to_json() for sample in shown],
    }

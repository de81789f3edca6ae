"""`shardwright inspect`: rows as the model sees them, lengths of documents, and what each way of batching makes of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from rich.console import Console

from shardwright.config.load import Loaded
from shardwright.console import say
from shardwright.data.arrays import FILLER, Int64
from shardwright.data.prepare import Prepared, make_order, prepare
from shardwright.errors import ConfigError, DataError, ExitCode
from shardwright.layout.legality import check_settings
from shardwright.tools.inspect.batching import MODES, batching_lines, measure
from shardwright.tools.inspect.sample import Decoder, legend, read_sample, sample_lines

_BAR = 40  # characters of the longest bar


def run_inspect(
    loaded: Loaded, console: Console, *, samples: int = 3, row: int | None = None, as_json: bool = False
) -> int:
    """Prints the report on `console` and returns the exit code. row: show only this row.

    Raises `ConfigError` for a row that does not exist.
    """
    check_settings(loaded)
    run = loaded.run
    prepared = prepare(run)
    if prepared is None:
        raise DataError("data.train names no files.")
    table = prepared.table
    if row is not None and not 0 <= row < len(table):
        raise ConfigError(f"There is no row {row}.", f"Rows are 0 to {len(table) - 1:,}.")
    rows = [row] if row is not None else first_rows(loaded, prepared, samples)
    decoder = Decoder(prepared.tokenizer_path)
    shown = [read_sample(prepared, number, decoder, run.data.batching == "bucket") for number in rows]
    lengths = table.documents.lengths
    found = [measure(run, prepared, mode) for mode in MODES] if row is None else []
    if as_json:
        report = {
            "summary": prepared.summary(),
            "notices": list(prepared.notices),
            "formats": prepared.formats,
            "counts": prepared.counts,
            "lengths": [
                {"from": low, "to": high, "documents": count} for low, high, count in bins(lengths, table.max_length)
            ],
            "document_length": attended_length(lengths, table.max_length),
            "batching": [batching.to_json() for batching in found],
            "samples": [sample.to_json() for sample in shown],
        }
        console.file.write(json.dumps(report, indent=1) + "\n")
        return ExitCode.DONE
    if row is None:
        facts = (prepared.summary(), *prepared.notices, "", *histogram_lines(lengths, table.max_length), "")
        for line in (*facts, *batching_lines(found, run.data.batching), ""):
            say(console, line)
    colour = console.is_terminal and not console.no_color
    console.print(legend(colour), soft_wrap=True)
    for sample in shown:
        for text in sample_lines(sample, colour):
            console.print(text, soft_wrap=True)
    return ExitCode.DONE


def first_rows(loaded: Loaded, prepared: Prepared, samples: int) -> list[int]:
    """The first `samples` rows in the order of training."""
    order, rows = make_order(loaded.run, prepared), []
    for update in range(order.total_updates):
        rows += [row for row in order.update_rows(update).tolist() if row != FILLER]
        if len(rows) >= samples:
            break
    return rows[:samples]


def bins(lengths: Int64, max_length: int) -> list[tuple[int, int, int]]:
    """(shortest, longest, how many) of the documents in bins of doubling length; `max_length` ends a bin."""
    edges = [1]
    while edges[-1] <= int(lengths.max()):
        edges.append(edges[-1] * 2)
    edges = sorted({*edges, max_length + 1} if max_length + 1 < edges[-1] else edges)
    counts, _ = np.histogram(lengths, [*edges[:-1], edges[-1] - 0.5])
    found = [(low, high - 1, count) for (low, high), count in zip(pairwise(edges), counts.tolist())]
    return found[next(number for number, (_, _, count) in enumerate(found) if count) :]


def attended_length(lengths: Int64, max_length: int) -> float:
    """Mean length of documents, each at most a row and weighted by its tokens: the length over which a packed token attends."""
    return float(np.average(np.minimum(lengths, max_length), weights=lengths))


def histogram_lines(lengths: Int64, max_length: int) -> Iterator[str]:
    """Bars of the lengths of documents."""
    found = bins(lengths, max_length)
    most = max(count for _, _, count in found)
    yield (
        f"Tokens of a document: least {lengths.min():,}, median {np.median(lengths):,.0f}, mean {lengths.mean():,.1f}, "
        f"most {lengths.max():,}; mean weighted by tokens {attended_length(lengths, max_length):,.1f} "
        "(`plan --document-length`)"
    )
    for low, high, count in found:
        bar = "█" * round(count / most * _BAR) or ("▏" if count else "")
        over = "  longer than data.max_length" if low > max_length else ""
        yield f"  {f'{low:,} to {high:,}' if high > low else f'{low:,}':>18} |{bar:<{_BAR}}| {count:,}{over}"

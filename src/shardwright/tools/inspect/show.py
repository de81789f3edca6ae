"""The report as text: in colour on a terminal, with marks where there is no colour."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
from rich.text import Text

from shardwright.data.arrays import Int64
from shardwright.tools.inspect.batches import Batching
from shardwright.tools.inspect.sample import Document, Piece, Sample

WIDTH = 40
GIVEN, TRAINED, SPECIAL, PADDING, BOUNDARY = "dim", "black on green", "bold magenta", "dim red", "bold blue"


def legend(colour: bool) -> Text:
    """What the styles, or the marks, of a sample mean."""
    if not colour:
        return Text(
            "[+trained+] [+0.5:trained with weight 0.5+] given, -- document: file:line --, ↵ a newline that the model sees"
        )
    text = Text()
    for name, style in (
        ("given", GIVEN),
        ("trained", TRAINED),
        ("padding", PADDING),
        ("document: file:line", BOUNDARY),
    ):
        text.append(name, style).append("  ")
    text.append("special token", SPECIAL).append(" (underlined: trained)  ").append("×0.5", "italic")
    return text.append(" weight of what follows  ↵ a newline that the model sees")


def sample_lines(sample: Sample, colour: bool) -> Iterator[Text]:
    """A row: its documents one below the other, and its padding."""
    tokens = sum(document.tokens for document in sample.documents)
    slots = f"{tokens} tokens, in slots as wide as the longest row beside it"
    if sample.padding is not None:
        slots = f"{tokens} of {tokens + sample.padding} slots filled"
    yield Text(f"Row {sample.row}: {_count(len(sample.documents), 'document')}, {slots}", "bold" if colour else "")
    for document in sample.documents:
        head = f"-- {document.place.removeprefix(f'{Path.cwd()}/')}: {document.tokens} tokens, {document.targets} trained --"
        yield Text(head, BOUNDARY if colour else "")
        yield _text(document, colour)
    if sample.padding:
        yield Text(f"-- {sample.padding} padding --", PADDING if colour else "")


def _text(document: Document, colour: bool) -> Text:
    text = Text()
    for weight, group in groupby(document.pieces, key=lambda piece: piece.weight):
        pieces = [(piece.text.replace("\n", "↵\n"), _style(piece)) for piece in group]
        if colour:
            if weight not in (0.0, 1.0):
                text.append(f"×{weight:g}", "italic")
            for shown, style in pieces:
                text.append(shown, style)
        else:
            shown = "".join(shown for shown, _ in pieces)
            text.append(f"[+{'' if weight == 1 else f'{weight:g}:'}{shown}+]" if weight else shown)
    if text.plain.endswith("\n"):
        text.right_crop(1)
    return text


def _style(piece: Piece) -> str:
    if piece.special:
        return f"{SPECIAL} underline" if piece.weight else SPECIAL
    return TRAINED if piece.weight else GIVEN


def bins(lengths: Int64, max_length: int) -> list[tuple[int, int, int]]:
    """(shortest, longest, how many) of the documents in bins of doubling length; `max_length` ends one."""
    edges = [1]
    while edges[-1] <= int(lengths.max()):
        edges.append(edges[-1] * 2)
    edges = sorted({*edges, max_length + 1} if max_length + 1 < edges[-1] else edges)
    counts, _ = np.histogram(lengths, [*edges[:-1], edges[-1] - 0.5])
    found = [(low, high - 1, count) for (low, high), count in zip(pairwise(edges), counts.tolist())]
    return found[next(number for number, (_, _, count) in enumerate(found) if count) :]


def attended_length(lengths: Int64, max_length: int) -> float:
    """Mean length of documents, none longer than a row, each weighted by its tokens: what packed attention works over."""
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
        bar = "█" * round(count / most * WIDTH) or ("▏" if count else "")
        over = "  over data.max_length" if low > max_length else ""
        yield f"  {f'{low:,} to {high:,}' if high > low else f'{low:,}':>18} |{bar:<{WIDTH}}| {count:,}{over}"


def batching_lines(found: Sequence[Batching], chosen: str) -> Iterator[str]:
    """One line for each way of batching; `>` is the run file's."""
    yield (
        f"  {'batching':<9}{'rows':>10}{'updates':>9}{'slots':>14}{'padding':>9}{'targets/slots':>15}"
        f"{'targets of an update: least, median, most':>44}{'spread':>8}"
    )
    for b in found:
        t = b.targets_of_an_update
        spread = f"{t.least:,}  {t.median:,.0f}  {t.most:,}"
        yield (
            f"{'>' if b.batching == chosen else ' '} {b.batching:<9}{b.rows:>10,}{b.updates_of_an_epoch:>9,}{b.slots:>14,}"
            f"{b.padding:>9.1%}{b.targets / b.slots:>15.1%}{spread:>44}{t.variation:>8.2f}"
        )
    seen = found[0].updates_seen
    yield (
        f"  Slots, padding and targets over {_count(seen, 'update')} of an epoch; spread is the standard deviation divided by "
        "the mean."
    )
    if any(b.batching == "bucket" for b in found):
        yield "  bucket: microbatches of per_device_train_batch_size rows, before a layout rounds their width up."


def _count(number: int, name: str) -> str:
    return f"{number:,} {name}{'' if number == 1 else 's'}"

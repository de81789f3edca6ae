"""Files sent from host to host: spans of bytes between ranks, and the copies of a checkpoint's files on other hosts.

Every rank goes through its own transfers in rounds. The spans of a round are posted together; while they travel, the rank
stores what arrived in the round before. No rank waits for a transfer between other ranks, and two spans of each transfer are
in memory. A span that cannot be read or stored is skipped and reported, so that its peer does not wait for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.checkpoint.filesystem import checksum, damaged, read_span, sync_file, write_span
from shardwright.checkpoint.index import file_pieces, index_text, parse_index
from shardwright.checkpoint.multi_host.hosts import Hosts
from shardwright.errors import CheckpointError
from shardwright.models.safetensors_io import byte_view


@dataclass(frozen=True)
class Span:
    """`length` bytes of `file` from byte `begin`."""

    file: str
    begin: int
    length: int


@dataclass(frozen=True)
class Transfer:
    """Spans that rank `source` reads and rank `target` stores. tag: unique, and the same on both ranks."""

    tag: int
    source: int
    target: int
    spans: Sequence[Span]


Use = Callable[[Transfer, Span, Tensor], None]


def exchange(
    group: dist.ProcessGroup, transfers: Sequence[Transfer], read: Use, store: Use
) -> list[tuple[Transfer, str]]:
    """Makes the transfers of this rank; returns those that failed here, and why.

    read: fills a span's bytes (uint8) before they are sent. store: takes the bytes that have arrived. Both may raise
    `OSError` or `CheckpointError`. Raises `RuntimeError` when a peer is gone.
    """
    rank, problems = dist.get_rank(), []

    def attempt(use: Use, transfer: Transfer, span: Span, data: Tensor) -> None:
        try:
            use(transfer, span, data)
        except (OSError, CheckpointError) as error:
            problems.append((transfer, str(error)))

    buffers = {
        t.tag: torch.empty(2, max(span.length for span in t.spans), dtype=torch.uint8) for t in transfers if t.spans
    }
    arrived: list[tuple[Transfer, Span, Tensor]] = []
    for number in range(max((len(t.spans) for t in transfers), default=-1) + 1):
        now = [(t, t.spans[number]) for t in transfers if number < len(t.spans)]
        views = [(t, span, buffers[t.tag][number % 2][: span.length]) for t, span in now]
        receiving = [(t, span, data) for t, span, data in views if t.target == rank]
        posted = [dist.irecv(data, t.source, group, t.tag) for t, _, data in receiving]
        for t, span, data in views:
            if t.source == rank:
                attempt(read, t, span, data)
                posted.append(dist.isend(data, t.target, group, t.tag))
        for t, span, data in arrived:
            attempt(store, t, span, data)
        for work in posted:
            if work is not None:
                work.wait()
        arrived = receiving
    return problems


@contextmanager
def open_files(directory: Path) -> Iterator[Callable[[str, int], int]]:
    """A function (name, flags) -> descriptor that opens each file of `directory` once; all are closed after the context.

    A file is opened when it is first used, so a rank that cannot open it still takes part in the exchange.
    """
    with ExitStack() as files:
        opened: dict[str, int] = {}

        def descriptor(name: str, flags: int) -> int:
            if name not in opened:
                opened[name] = os.open(directory / name, flags, 0o644)
                files.callback(os.close, opened[name])
            return opened[name]

        yield descriptor


def add_hosts(hosts: Hosts, copies: int, records: Sequence[dict[str, Any] | None]) -> list[dict[str, Any]]:
    """The records of all ranks that have written a file; with several hosts, with the `ranks` and `hosts` that keep each file.

    The rank that has written, and its host, come first.
    """
    found = []
    for rank, record in enumerate(records):
        if record is not None and hosts.count > 1:
            ranks = [rank, *hosts.replica_ranks(rank, copies)]
            record = {**record, "ranks": ranks, "hosts": [hosts.of_rank[r] for r in ranks]}
        found += [record] if record is not None else []
    return found


def send_copies(hosts: Hosts, records: Sequence[dict[str, Any]], directory: Path) -> None:
    """Sends what this rank has written to the ranks that keep a copy, and writes and syncs the copies that this rank keeps.

    directory: of this rank's files, and for the copies. Raises `OSError` where a file cannot be read or written, or where
    other bytes have arrived than were written.
    """
    rank, index = dist.get_rank(), parse_index(directory, index_text(records, {}).encode())
    transfers, sums = [], {}
    pairs = [(record, target) for record in records for target in record["ranks"][1:]]
    for tag, (record, target) in enumerate(pairs, start=1):
        source = record["ranks"][0]
        if rank in (source, target):
            spans = []
            for begin, length, expected, _ in file_pieces(index, record["file"]):
                spans.append(Span(record["file"], begin, length))
                sums[spans[-1]] = expected
            transfers.append(Transfer(tag, source, target, spans))
    if not transfers:
        return
    assert hosts.group is not None
    with open_files(directory) as descriptor:

        def read(transfer: Transfer, span: Span, data: Tensor) -> None:
            read_span(descriptor(span.file, os.O_RDONLY), directory / span.file, span.begin, byte_view(data))

        def store(transfer: Transfer, span: Span, data: Tensor) -> None:
            if checksum(byte_view(data)) != sums[span]:
                raise damaged(directory / span.file, f"has not arrived as rank {transfer.source} has written it")
            file = descriptor(span.file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            write_span(file, span.begin, byte_view(data))
            if span == transfer.spans[-1]:
                sync_file(file)

        problems = exchange(hosts.group, transfers, read, store)
    if problems:
        raise OSError(problems[0][1])

"""Copies of a checkpoint's files on other hosts, checked there piece by piece against what their writers have summed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shardwright.checkpoint.files import (
    checksum,
    damaged,
    file_pieces,
    index_text,
    parse_index,
    read_span,
    settle,
    write_span,
)
from shardwright.checkpoint.multi_host.exchange import Span, Transfer, exchange
from shardwright.checkpoint.multi_host.hosts import Hosts
from shardwright.models.safetensors_io import byte_view


def hosts_of(hosts: Hosts, copies: int, records: Sequence[dict[str, Any] | None]) -> list[dict[str, Any]]:
    """The records of all ranks that have written a file; with several hosts, each with `hosts` (its own first) and `ranks`.

    ranks: the one that has written, then those that make a copy.
    """
    found = []
    for rank, record in enumerate(records):
        if record is not None and hosts.count > 1:
            ranks = [rank, *hosts.copiers(rank, copies)]
            record = {**record, "ranks": ranks, "hosts": [hosts.of_rank[r] for r in ranks]}
        found += [record] if record is not None else []
    return found


def send_copies(hosts: Hosts, records: Sequence[dict[str, Any]], directory: Path) -> None:
    """Sends what this rank has written to the ranks that keep a copy, and writes and syncs the copies that it keeps.

    directory: of this rank's files, and for the copies. Raises `OSError` where a file cannot be read or written, or where
    another thing has come than was written.
    """
    rank, index = dist.get_rank(), parse_index(directory, index_text(records, {}).encode())
    transfers, sums, tag = [], {}, 0
    for record in records:
        source, *targets = record["ranks"]
        for target in targets:
            tag += 1
            if rank in (source, target):
                spans = []
                for begin, length, right, _ in file_pieces(index, record["file"]):
                    spans.append(Span(record["file"], begin, length))
                    sums[spans[-1]] = right
                transfers.append(Transfer(tag, source, target, spans))
    if not transfers:
        return
    assert hosts.group is not None
    with ExitStack() as files:
        opened: dict[str, int] = {}

        def place(name: str, flags: int) -> int:
            """Opened when it is first used: a rank that cannot still takes part in the exchange."""
            if name not in opened:
                opened[name] = os.open(directory / name, flags, 0o644)
                files.callback(os.close, opened[name])
            return opened[name]

        def read(transfer: Transfer, span: Span, data: Tensor) -> None:
            read_span(place(span.file, os.O_RDONLY), directory / span.file, span.begin, byte_view(data))

        def take(transfer: Transfer, span: Span, data: Tensor) -> None:
            if checksum(byte_view(data)) != sums[span]:
                raise damaged(directory / span.file, f"has not come as rank {transfer.source} has written it")
            descriptor = place(span.file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            write_span(descriptor, span.begin, byte_view(data))
            if span == transfer.spans[-1]:
                settle(descriptor)

        problems = exchange(hosts.group, transfers, read, take)
    if problems:
        raise OSError(problems[0][1])

"""Checkpoints whose files lie on the disks of several hosts: found together, and read over the network where they are not here.

Which host has which file is what their directories say when the run resumes: own files and copies count alike. Every piece
is checked by the rank that needs it; where a file turns out to be damaged on one host, another that has it is asked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from shardwright.checkpoint.directory import complete_checkpoints, refuse_earlier, update_of
from shardwright.checkpoint.exchange import Span, Transfer, exchange
from shardwright.checkpoint.files import TENSORS, Index, check_piece, read_span
from shardwright.checkpoint.hosts import Hosts, everyone, from_rank
from shardwright.checkpoint.manifest import (
    Manifest,
    Share,
    read_config,
    read_index,
    read_manifest,
    share_of,
)
from shardwright.checkpoint.parts import byte_view
from shardwright.checkpoint.reader import Wanted, read_file, wanted_pieces
from shardwright.errors import CheckpointError, DamagedCheckpointError

T = TypeVar("T")
Shares = dict[int, Share]
"""Host -> what it has of one checkpoint."""
Problem = tuple[int, str, str]
"""(host, file, what is wrong with it there)."""


@dataclass
class Across:
    """A checkpoint of which every file is on some host; a `reader.Source`.

    path: on every host. there: hosts that have a part of it. holders: hosts that have each file. notes: what a person should
    know of how it was found and read; equal on all ranks.
    """

    path: Path
    hosts: Hosts
    there: Collection[int]
    holders: dict[str, list[int]]
    notes: list[str] = field(default_factory=list)

    def manifest(self) -> Manifest:
        return self._first(lambda: read_manifest(self.path))

    def config(self) -> str:
        return self._first(lambda: read_config(self.path))

    def index(self) -> Index:
        return replace(self._first(lambda: read_index(self.path)), directory=self.path / TENSORS)

    def _first(self, read: Callable[[], T]) -> T:
        """What the first host reads that can."""
        own, problem = [], ""
        if self.hosts.leads and self.hosts.own in self.there:
            try:
                own.append(read())
            except CheckpointError as error:
                problem = str(error)
        found = everyone((bool(own), problem))
        rank = next((rank for rank, (good, _) in enumerate(found) if good), None)
        if rank is None:
            raise DamagedCheckpointError(" ".join(text for _, text in found if text))
        value: T = from_rank(rank, own)[0]
        return value

    def read(self, index: Index, tensors: Mapping[str, Tensor], partial: Sequence[str]) -> None:
        """Fills the local parts of `tensors` as `read_into` does, from this host's files or from another's."""
        wanted = wanted_pieces(index, tensors, partial)
        while True:
            own = self._round(index, wanted)
            found: dict[tuple[int, str], str] = {}
            for host, name, text in sorted(problem for problems in everyone(own) for problem in problems):
                found.setdefault((host, name), text)
            if not found:
                return
            for (host, name), text in found.items():
                self.holders[f"{TENSORS}/{name}"].remove(host)
                self.notes.append(f"On {self.hosts.names[host]}, {text} Another host is asked for it.")
            lost = [text for (_, name), text in found.items() if not self.holders[f"{TENSORS}/{name}"]]
            if lost:
                raise DamagedCheckpointError(lost[0], "No other host has it.")
            wanted = {name: wanted[name] for _, name, _ in own if name in wanted}

    def _round(self, index: Index, wanted: Mapping[str, Sequence[Wanted]]) -> list[Problem]:
        """Reads what lies here, serves what others ask for and takes what was asked of them; returns what went wrong."""
        here, rank, problems = self.hosts.own, dist.get_rank(), []
        asked = {
            name: found for name, found in wanted.items() if here not in self.holders[f"{TENSORS}/{name}"]
        }
        for name in wanted.keys() - asked.keys():
            try:
                read_file(index, name, wanted[name])
            except (CheckpointError, OSError) as error:
                problems.append((here, name, str(error)))
        requests = everyone(
            [(name, [(want.offset, want.length) for want in found]) for name, found in asked.items()]
        )
        transfers, tag = [], 0
        for target, files in enumerate(requests):
            for name, places in files:
                tag += 1
                source = self._server(name, target)
                if rank in (source, target):
                    transfers.append(Transfer(tag, source, target, [Span(name, *place) for place in places]))
        pieces = {(name, want.offset): want for name, found in asked.items() for want in found}
        for transfer, text in self._exchanged(index, transfers, pieces):
            problems.append((self.hosts.of_rank[transfer.source], transfer.spans[0].file, text))
        return problems

    def _server(self, name: str, target: int) -> int:
        """The rank that sends a file to `target`: ranks take turns on the hosts that have it."""
        holders = self.holders[f"{TENSORS}/{name}"]
        ranks = self.hosts.ranks(holders[target % len(holders)])
        return ranks[target % len(ranks)]

    def _exchanged(
        self, index: Index, transfers: Sequence[Transfer], pieces: Mapping[tuple[str, int], Wanted]
    ) -> list[tuple[Transfer, str]]:
        if not transfers:
            return []
        assert self.hosts.group is not None
        with ExitStack() as files:
            opened: dict[str, int] = {}

            def read(transfer: Transfer, span: Span, data: Tensor) -> None:
                where = index.directory / span.file
                if span.file not in opened:
                    opened[span.file] = os.open(where, os.O_RDONLY)
                    files.callback(os.close, opened[span.file])
                read_span(opened[span.file], where, span.begin, byte_view(data))

            def take(transfer: Transfer, span: Span, data: Tensor) -> None:
                want = pieces[span.file, span.begin]
                check_piece(index.directory / span.file, span.begin, byte_view(data), want.checksum, want.key)
                want.put(data)

            problems = exchange(self.hosts.group, transfers, read, take)
        return list({transfer.tag: (transfer, text) for transfer, text in reversed(problems)}.values())


def find_across(hosts: Hosts, output_dir: Path, resume: str, bad: Collection[Path] = ()) -> Across | None:
    """The checkpoint that `checkpoint.resume` means, as `directory.find`, among what all hosts have together; collective.

    `auto` is the newest of which no file is lost. Raises the same errors on all ranks.
    """
    named = resume not in ("auto", "never")
    parent = Path(resume).parent if named else output_dir
    listed = everyone(_listing(parent) if hosts.leads else {})
    by_name: dict[str, dict[int, Share | str]] = {}
    for rank, part in enumerate(listed):
        for name, share in part.items():
            by_name.setdefault(name, {})[hosts.of_rank[rank]] = share
    names = [Path(resume).name] if named else sorted(by_name, key=lambda name: -update_of(Path(name)))
    if resume == "never":
        refuse_earlier(output_dir, names[::-1])
        return None
    reasons: list[str] = []
    for name in names:
        for shares in _versions(by_name.get(name, {})):
            holders, lost = _holders(shares)
            if parent / name in bad:
                continue
            if not lost:
                return Across(parent / name, hosts, shares.keys(), holders, reasons)
            reasons.append(f"{parent / name} is not used: {lost}")
        for host, text in by_name.get(name, {}).items():
            if isinstance(text, str):
                reasons.append(f"On {hosts.names[host]}, {text}")
    if named or names:
        raise CheckpointError(
            f"No checkpoint of {', '.join(str(parent / name) for name in names[:3])} is whole on the {hosts.count} hosts "
            f"that are here. {' '.join(reasons) or 'It is not there.'}",
            "The run would start from nothing.",
            "Bring back the disk of a host that is named, or set another checkpoint.output_dir.",
        )
    return None


def _listing(parent: Path) -> dict[str, Any]:
    """What one host has: name -> its share, or what is wrong with the manifest."""
    found: dict[str, Any] = {}
    for path in complete_checkpoints(parent):
        try:
            found[path.name] = share_of(path)
        except CheckpointError as error:
            found[path.name] = str(error)
    return found


def _versions(found: Mapping[int, Share | str]) -> list[Shares]:
    """The shares of hosts that wrote one checkpoint together; a host that was away may have another of the same update."""
    versions: dict[str, Shares] = {}
    for host, share in sorted(found.items(), key=lambda item: item[0]):
        if isinstance(share, Share):
            versions.setdefault(share.checksum, {})[host] = share
    return list(versions.values())


def _holders(shares: Shares) -> tuple[dict[str, list[int]], str]:
    """(hosts that have each file, which is lost; empty where none is)."""
    holders: dict[str, list[int]] = {}
    for host, share in shares.items():
        for name in share.held:
            holders.setdefault(name, []).append(host)
    lost = {n: hosts for share in shares.values() for n, hosts in share.absent.items() if n not in holders}
    if not lost:
        return holders, ""
    name, hosts = min(lost.items())
    more = f", nor {len(lost) - 1} more" if len(lost) > 1 else ""
    was = f", which was on {' and '.join(hosts)}" if hosts else ""
    return holders, f"no host that is here has {name}{was}{more}."

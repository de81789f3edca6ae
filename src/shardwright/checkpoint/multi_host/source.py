"""Checkpoints whose files lie on the disks of several hosts: found together, missing files read over the network.

The directories of all hosts are listed when the run resumes: own files and copies count alike. The rank that
needs a piece checks it. Where a file turns out to be damaged on one host, another host that has the file is asked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from shardwright.checkpoint.directory import complete_checkpoints, update_of
from shardwright.checkpoint.filesystem import check_piece, read_span
from shardwright.checkpoint.index import TENSORS, Index
from shardwright.checkpoint.manifest import (
    MANIFEST,
    LineageNode,
    Manifest,
    Share,
    read_config,
    read_index,
    read_manifest,
    share_of,
)
from shardwright.checkpoint.multi_host.hosts import Hosts
from shardwright.checkpoint.multi_host.transfer import Span, Transfer, exchange, open_files
from shardwright.checkpoint.reader import WantedPiece, read_file, wanted_pieces
from shardwright.checkpoint.resume import (
    Choice,
    current_lineage,
    number_of,
    read_choice,
    refuse_earlier,
    resolve_link,
)
from shardwright.errors import CheckpointError, DamagedCheckpointError
from shardwright.mesh.object_collectives import broadcast_object, gather_objects
from shardwright.models.safetensors_io import byte_view

T = TypeVar("T")
Shares = dict[int, Share]
"""Host -> its share of one checkpoint."""
Problem = tuple[int, str, str]
"""(host, file, what is wrong with it there)."""


@dataclass
class MultiHostCheckpoint:
    """A checkpoint of which every file is on some host; a `reader.CheckpointSource`."""

    path: Path
    """On every host."""
    hosts: Hosts
    present_on: Collection[int]
    """Hosts that have a part of the checkpoint."""
    holders: dict[str, list[int]]
    """File -> hosts that have it."""
    notes: list[str] = field(default_factory=list)
    """Lines for a person about how the checkpoint was found and read; equal on all ranks."""

    def manifest(self) -> Manifest:
        return self._first(lambda: read_manifest(self.path))

    def config(self) -> str:
        return self._first(lambda: read_config(self.path))

    def index(self) -> Index:
        return replace(self._first(lambda: read_index(self.path)), directory=self.path / TENSORS)

    def _first(self, read: Callable[[], T]) -> T:
        """What the first host reads that can."""
        own, problem = [], ""
        if self.hosts.leads and self.hosts.own in self.present_on:
            try:
                own.append(read())
            except CheckpointError as error:
                problem = str(error)
        found = gather_objects((bool(own), problem))
        rank = next((rank for rank, (good, _) in enumerate(found) if good), None)
        if rank is None:
            raise DamagedCheckpointError(" ".join(text for _, text in found if text))
        value: T = broadcast_object(own, rank)[0]
        return value

    def read(self, index: Index, tensors: Mapping[str, Tensor], partial: Sequence[str]) -> None:
        """Fills the local parts of `tensors` as `read_into` does, from this host's files or from another's."""
        wanted = wanted_pieces(index, tensors, partial)
        while True:
            own = self._round(index, wanted)
            found: dict[tuple[int, str], str] = {}
            for host, name, text in sorted(problem for problems in gather_objects(own) for problem in problems):
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

    def _round(self, index: Index, wanted: Mapping[str, Sequence[WantedPiece]]) -> list[Problem]:
        """Reads the files of this host, sends what other hosts need, receives the rest; returns the problems of this rank."""
        here, rank, problems = self.hosts.own, dist.get_rank(), []
        asked = {name: found for name, found in wanted.items() if here not in self.holders[f"{TENSORS}/{name}"]}
        for name in wanted.keys() - asked.keys():
            try:
                read_file(index, name, wanted[name])
            except (CheckpointError, OSError) as error:
                problems.append((here, name, str(error)))
        requests = gather_objects(
            [(name, [(want.offset, want.length) for want in found]) for name, found in asked.items()]
        )
        needed = [(target, *file) for target, files in enumerate(requests) for file in files]
        transfers = []
        for tag, (target, name, spans) in enumerate(needed, start=1):
            source = self._server(name, target)
            if rank in (source, target):
                transfers.append(Transfer(tag, source, target, [Span(name, *span) for span in spans]))
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
        self, index: Index, transfers: Sequence[Transfer], pieces: Mapping[tuple[str, int], WantedPiece]
    ) -> list[tuple[Transfer, str]]:
        if not transfers:
            return []
        assert self.hosts.group is not None
        with open_files(index.directory) as descriptor:

            def read(transfer: Transfer, span: Span, data: Tensor) -> None:
                file = descriptor(span.file, os.O_RDONLY)
                read_span(file, index.directory / span.file, span.begin, byte_view(data))

            def store(transfer: Transfer, span: Span, data: Tensor) -> None:
                want = pieces[span.file, span.begin]
                check_piece(index.directory / span.file, span.begin, byte_view(data), want.checksum, want.key)
                want.put(data)

            problems = exchange(self.hosts.group, transfers, read, store)
        return list({transfer.tag: (transfer, text) for transfer, text in reversed(problems)}.values())


def latest_choice(hosts: Hosts, output_dir: Path) -> Choice | None:
    """The last choice on the disks of all hosts: a host that was away may hold an older choice. Collective."""
    found = gather_objects(read_choice(output_dir) if hosts.leads else None)
    return max((c for c in found if c is not None), key=lambda c: number_of(c.lineage), default=None)


def find_on_hosts(
    hosts: Hosts, output_dir: Path, resume: str, bad: Collection[Path] = ()
) -> MultiHostCheckpoint | None:
    """The checkpoint that `checkpoint.resume` means, as `find_checkpoint`, among the disks of all hosts; collective.

    `auto` is the newest on the branch chosen last of which no file is lost. Raises the same errors on all ranks.
    """
    choice = latest_choice(hosts, output_dir)
    chosen = resume not in ("auto", "never")
    parent = Path(resume).parent if chosen else output_dir
    keys = [broadcast_object(resolve_link(resume).name)] if chosen else _keys(hosts, output_dir, choice)
    if resume == "never":
        refuse_earlier(output_dir, [key for key in reversed(keys) if not os.path.isabs(key)])
        return None
    listed = gather_objects(_listing(parent, keys) if hosts.leads else {})
    by_key: dict[str, dict[int, Share | str]] = {key: {} for key in keys}
    for rank, part in enumerate(listed):
        for key, share in part.items():
            by_key[key][hosts.of_rank[rank]] = share
    versions = [(key, shares) for key in keys for shares in _versions(by_key[key])]
    if not chosen:
        nodes = [_node(key, shares) for key, shares in versions]
        lineage = current_lineage(choice, nodes)
        kept = [(n.update, version) for n, version in zip(nodes, versions) if n.is_on(lineage)]
        versions = [version for _, version in sorted(kept, key=lambda pair: -pair[0])]
    reasons: list[str] = []
    for key, shares in versions:
        holders, lost = _holders(shares)
        if parent / key in bad:
            continue
        if not lost:
            return MultiHostCheckpoint(parent / key, hosts, shares.keys(), holders, reasons)
        reasons.append(f"{parent / key} is not used: {lost}")
    unread = [(host, text) for key in keys for host, text in by_key[key].items() if isinstance(text, str)]
    reasons += [f"On {hosts.names[host]}, {text}" for host, text in unread]
    if keys:
        branch = " and on the branch that was chosen last" if choice is not None and not chosen else ""
        raise CheckpointError(
            f"No checkpoint of {', '.join(str(parent / key) for key in keys[:3])} is whole on the {hosts.count} hosts "
            f"that are here{branch}. {' '.join(reasons) or 'No host has this checkpoint.'}",
            "The run would start from nothing.",
            "Restore the disk of a host that is named, or set another checkpoint.output_dir.",
        )
    return None


def _keys(hosts: Hosts, output_dir: Path, choice: Choice | None) -> list[str]:
    """Checkpoints that any host has, newest first: names in `output_dir`, and the path of the one the branch began from."""
    listed = gather_objects([path.name for path in complete_checkpoints(output_dir)] if hosts.leads else [])
    found = sorted({name for names in listed for name in names}, key=lambda name: -update_of(Path(name)))
    return [*found, str(choice.origin_elsewhere)] if choice and choice.origin_elsewhere else found


def _node(key: str, shares: Shares) -> LineageNode:
    return replace(next(iter(shares.values())).node, path=Path(key))


def _listing(parent: Path, keys: Sequence[str]) -> dict[str, Any]:
    """The checkpoints of one host: name -> its share, or what is wrong with the manifest."""
    found: dict[str, Any] = {}
    for key in keys:
        if (parent / key / MANIFEST).is_file():
            try:
                found[key] = share_of(parent / key)
            except CheckpointError as error:
                found[key] = str(error)
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

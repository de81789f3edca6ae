"""The rendezvous of ranks in the store of rank 0. A waiting rank prints what it waits for, and can be stopped.

Calls that may block run in a thread of their own: a signal's handler runs only in the main thread, and not while that thread is
inside torch.
"""

from __future__ import annotations

import errno
import json
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from itertools import count
from typing import Any

import torch.distributed as dist

from shardwright.errors import ConfigError, ShardwrightError, StoppedEarly
from shardwright.mesh.cluster_environment import RESTARTS, STORE_FD, RankInfo
from shardwright.mesh.host_resources import HostResources
from shardwright.torch_private import HashStore, PrefixStore, Store, TCPStore

JOIN_SECONDS = 300
"""The least time for which ranks wait for each other: they load at different speeds."""
NAME_SECONDS = 60
"""How long a host's name may be unknown: a cluster's names appear some seconds after its machines."""
FIRST_WORD_SECONDS = 5
"""When a waiting rank prints its first line; each later line comes after twice the time."""
WATCHED_FACTOR = 12
"""Factor on these times where our launcher has started all ranks and watches them."""

_number = count()
"""Numbers the rendezvous of this process: torchrun's store outlives a rendezvous, and keys of two must not mix."""


class Rendezvous:
    """The store in which all ranks of a run meet. asked_to_stop: whether this process was told to stop."""

    def __init__(
        self,
        rank_info: RankInfo,
        environment: Mapping[str, str],
        timeout_seconds: float,
        asked_to_stop: Callable[[], bool],
    ) -> None:
        self._rank_info, self._asked_to_stop = rank_info, asked_to_stop
        self._seconds = max(timeout_seconds, JOIN_SECONDS)
        self._shared = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self.holds_store = not self._shared
        """Whether the store lives in a rank of this job, which must leave last."""
        store = HashStore() if rank_info.world_size == 1 else self._reach(environment)
        self.store: Store = PrefixStore(f"shardwright/{environment.get(RESTARTS, '0')}/{next(_number)}", store)
        self._run = {name: environment.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")}

    def exchange(self, mine: HostResources) -> list[HostResources]:
        """The resources of all ranks, in their order. Collective. Raises `ConfigError` when another run is met."""
        if self._rank_info.world_size == 1:
            return [mine]
        rank, ranks = self._rank_info.rank, self._rank_info.world_size
        run = json.dumps({"world_size": ranks, **self._run})
        if rank == 0:
            self.store.set("run", run)
        self._until(lambda: self.store.check(["run"]), lambda: "rank 0 to begin")
        if (other := self.store.get("run").decode()) != run or self.store.add(f"rank {rank}", 1) > 1:
            raise ConfigError(
                f"{self._place} belongs to another run"
                + (f" ({other}, this is {run})." if other != run else f", which has a rank {rank} already."),
                "Each run needs a port of its own.",
                "Set MASTER_PORT to a free one, or start with `shardwright ... --nproc-per-node N`.",
            )
        self.store.set(f"resources {rank}", json.dumps(asdict(mine)))
        self.store.add("there", 1)
        if rank == 0:
            self._until(lambda: self.store.add("there", 0) >= ranks, self._missing)
            self.store.set(
                "all_resources", _packed(self.store.multi_get([f"resources {rank}" for rank in range(ranks)]))
            )
        self._until(lambda: self.store.check(["all_resources"]), lambda: "rank 0 to count the other ranks")
        return _unpacked(self.store.get("all_resources"))

    def _missing(self) -> str:
        ranks = range(self._rank_info.world_size)
        missing = [rank for rank in ranks if not self.store.check([f"resources {rank}"])]
        shown = ", ".join(map(str, missing[:16])) + (" and more" if len(missing) > 16 else "")
        return f"{len(missing)} of {len(ranks)} ranks: {shown}"

    @property
    def _place(self) -> str:
        return f"{self._rank_info.master_addr}:{self._rank_info.master_port}"

    def _reach(self, environment: Mapping[str, str]) -> Store:
        """The store at the master's address; rank 0 opens it, unless torchrun's agent has."""
        place = self._rank_info
        if not place.master_addr or not 0 < place.master_port < 2**16:
            raise ConfigError(
                f"MASTER_ADDR = `{place.master_addr}`, MASTER_PORT = {place.master_port} is no address where ranks can meet.",
                "All ranks need the host of rank 0 and one free port on it, from 1 to 65535.",
                "Set both to the same values on every rank.",
            )
        listening: int | None = None
        if place.rank == 0 and not self._shared:
            held = environment.get(STORE_FD) if place.started_by == "shardwright" else None
            listening = int(held) if held else _listen(place.master_port)
        connection = _StoreConnection(place, listening, self._seconds)
        connection.start()
        self._until(lambda: not connection.is_alive(), lambda: connection.waits_for)
        if connection.error is not None:
            raise connection.error
        assert connection.store is not None, "the thread ends with a store or an error"
        return connection.store

    def _until(self, done: Callable[[], Any], what: Callable[[], str]) -> None:
        """Waits until `done()`, and prints `what` it waits for. Raises after the time limit, or when told to stop."""
        watched = self._rank_info.started_by == "shardwright"
        passed, word, pause = 0.0, float(FIRST_WORD_SECONDS * (WATCHED_FACTOR if watched else 1)), 0.001
        while not done():
            if self._asked_to_stop():
                raise StoppedEarly(f"Asked to stop while waiting for {what()}.", "", "There is nothing to save.")
            if passed > self._seconds:
                raise ShardwrightError(
                    f"Rank {self._rank_info.rank} has waited {self._seconds:g} s for {what()}.",
                    "All ranks must start within that time and reach the host of rank 0.",
                    "Look at the output of the missing ranks, and check MASTER_ADDR and MASTER_PORT on every rank.",
                )
            if passed > word:
                word *= 2
                print(
                    f"shardwright: rank {self._rank_info.rank} has waited {passed:.0f} s for {what()}.",
                    file=sys.stderr,
                    flush=True,
                )
            _pause(pause)
            passed, pause = passed + pause, min(0.2, 1.5 * pause)


class _StoreConnection(threading.Thread):
    """Connects to the store, again and again, until it has a `store`, or an `error` that another attempt would meet too."""

    def __init__(self, place: RankInfo, listening: int | None, seconds: float) -> None:
        super().__init__(name="rendezvous", daemon=True)
        self._place, self._listening, self._seconds = place, listening, seconds
        self._at = f"{place.master_addr}:{place.master_port}"
        self.waits_for = f"rank 0 at {self._at}"
        self.store: Store | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._reach_host()
            self.waits_for = f"an answer from {self._at}, where perhaps another program than shardwright listens"
            self.store = TCPStore(
                self._place.master_addr,
                self._place.master_port,
                self._place.world_size,
                is_master=self._listening is not None,
                timeout=timedelta(seconds=self._seconds),
                wait_for_workers=False,
                master_listen_fd=self._listening,
            )
        except (ShardwrightError, RuntimeError) as error:
            self.error = error

    def _reach_host(self) -> None:
        """Returns when the host's name resolves and its port accepts connections."""
        unknown, pause = 0.0, 0.05
        while True:
            try:
                socket.create_connection((self._place.master_addr, self._place.master_port), 5).close()
                return
            except socket.gaierror as error:
                self.waits_for = f"rank 0: the host {self._place.master_addr} is unknown ({error.strerror})"
                unknown += pause
                if unknown > NAME_SECONDS:
                    raise ConfigError(
                        f"The host {self._place.master_addr} is unknown ({error.strerror}).",
                        "The ranks meet at MASTER_ADDR, the machine of rank 0.",
                        "Set MASTER_ADDR to a name or address that this machine can reach.",
                    ) from None
            except OSError as error:
                self.waits_for = f"rank 0 at {self._at} ({error.strerror or error})"
            _pause(pause)
            pause = min(1.0, 1.5 * pause)


def _pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def _listen(port: int) -> int:
    """A descriptor of a socket that listens at `port` on all addresses. Raises `ConfigError` where the port is taken."""
    try:
        return _bound(port, socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)
    except OSError as error:
        reason = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
        raise ConfigError(
            f"Port {port} of this machine {reason}, and rank 0 must listen there (MASTER_PORT).",
            "Another run or program uses this port." if error.errno == errno.EADDRINUSE else "",
            "Set MASTER_PORT to a free port on every rank, or start with `shardwright ... --nproc-per-node N`.",
        ) from None


def _bound(port: int, family: socket.AddressFamily) -> int:
    both = family == socket.AF_INET6
    return socket.create_server(("", port), family=family, backlog=2048, dualstack_ipv6=both).detach()


def _packed(all_resources: Sequence[bytes]) -> str:
    """The resources of all ranks as one text, equal ones once: most ranks of a machine have the same."""
    table = list(dict.fromkeys(all_resources))
    places = {resources: number for number, resources in enumerate(table)}
    return json.dumps(
        [[json.loads(resources) for resources in table], [places[resources] for resources in all_resources]]
    )


def _unpacked(text: bytes) -> list[HostResources]:
    table, numbers = json.loads(text)
    made = [HostResources.read(resources) for resources in table]
    return [made[number] for number in numbers]


def announce_exit(store: Store, rank: int, ranks: int, seconds: float) -> None:
    """Records in the store that this rank has left; rank 0, which holds the store, waits `seconds` for the other ranks."""
    with suppress(dist.DistError):  # a peer, or rank 0 with the store, is already gone
        store.set(f"left/{rank}", "1")
        if rank == 0:
            store.wait([f"left/{other}" for other in range(1, ranks)], timedelta(seconds=seconds))

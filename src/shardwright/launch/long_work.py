"""Work that some ranks do while all other ranks wait for them: however long it takes, not as long as a collective may.

The ranks wait in their store. A rank that works counts there, so that the ranks that wait know that it is alive.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from shardwright.errors import ShardwrightError
from shardwright.launch.heartbeat import Heartbeat
from shardwright.measure import clock
from shardwright.mesh.cluster_environment import RankInfo

if TYPE_CHECKING:
    from shardwright.torch_private import Store  # the launcher does not load torch

BEAT_SECONDS = 1.0
LIMIT_SECONDS = 24 * 3600.0
"""Tokenising may take hours. Work that has not ended after a day is taken for a hang."""
FIRST_WORD_SECONDS = 5.0
"""When a waiting rank prints its first line; each later line comes after twice the time."""
LOOK_SECONDS = 2.0
"""How often a waiting rank asks the store, after its first questions. Thousands of ranks ask one store."""

_number = count()
"""Numbers the works of this process, which are the same on all ranks: their keys must not mix."""


@dataclass
class LongWork:
    """Work of the ranks `workers`, for which all ranks wait.

    place: of this rank. what: what a worker does, as a line says it: "prepares the run".
    timeout_seconds: a worker that does not count for so long is gone.
    store: makes a connection to the store of all ranks. heartbeat: of this rank; it beats meanwhile, so that nothing takes the
        wait for a hang.
    """

    place: RankInfo
    workers: Sequence[int]
    what: str
    timeout_seconds: float
    store: Callable[[], Store]
    heartbeat: Heartbeat
    _key: str = field(init=False)
    _asking: Store = field(init=False)

    def run(self, work: Callable[[], object]) -> None:
        """Calls `work` on the workers; returns on every rank when all workers have done it. Collective.

        Raises `ShardwrightError` where a worker is gone or takes longer than `LIMIT_SECONDS`, and torch's `DistError` where the
        store is gone with its rank.
        """
        self._key, self._asking = f"shardwright/long work {next(_number)}", self.store()
        rank, first = self.place.rank, self.workers[0]
        if rank not in self.workers:
            self._wait(first, f"{self._key}/end")
        else:
            with self._counting():
                work()
                self._asking.set(f"{self._key}/{rank}/done", "1")
                if rank == first:
                    self._end_for_all()
                else:
                    self._wait(first, f"{self._key}/end")
        if problem := self._asking.get(f"{self._key}/end").decode():
            raise ShardwrightError(*problem.split("\n"))

    def _end_for_all(self) -> None:
        """The first worker waits for the other workers and tells all ranks the end: each rank asks for one key only."""
        problem = ""
        try:
            for worker in self.workers[1:]:
                self._wait(worker, f"{self._key}/{worker}/done")
        except ShardwrightError as error:
            problem = "\n".join((error.what, error.why, error.fix))
        self._asking.set(f"{self._key}/end", problem)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """While the context lasts, a thread counts in the store that this worker is alive."""
        ended, store = threading.Event(), self.store()

        def count_up() -> None:
            with suppress(RuntimeError):  # the store is gone with its rank; the main thread will meet that too
                while True:
                    store.add(f"{self._key}/{self.place.rank}/alive", 1)
                    self.heartbeat.beat()
                    if ended.wait(BEAT_SECONDS):
                        return

        thread = threading.Thread(target=count_up, name="long work", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(BEAT_SECONDS)

    def _wait(self, worker: int, key: str) -> None:
        """Returns when `key` is there. Raises `ShardwrightError` where `worker`, which sets the key, is gone."""
        began = counted = clock.now()
        alive, word, pause = -1, FIRST_WORD_SECONDS, 0.01
        while not self._asking.check([key]):
            now, latest = clock.now(), self._asking.add(f"{self._key}/{worker}/alive", 0)
            if latest != alive:
                alive, counted = latest, now
            if now - counted > self.timeout_seconds:
                raise ShardwrightError(
                    f"Rank {worker} {self.what}, and has given no sign of life for {now - counted:.0f} s.",
                    "All other ranks wait for it.",
                    "Look at the output of that rank and at its host, then start all ranks again.",
                )
            if now - began > LIMIT_SECONDS:
                raise ShardwrightError(
                    f"Rank {worker} {self.what}, and has not ended after {(now - began) / 3600:.0f} hours.",
                    "All other ranks wait for it, and their GPUs with them.",
                    "Look at the output of that rank. `shardwright inspect RUN.yaml` tokenises before a run, without GPUs.",
                )
            if now - began > word and self.place.local_rank <= 1:  # one or two lines a host
                word *= 2
                print(
                    f"shardwright: rank {self.place.rank} has waited {now - began:.0f} s for rank {worker}, which {self.what}.",
                    file=sys.stderr,
                    flush=True,
                )
            if self.place.rank not in self.workers:
                self.heartbeat.beat()
            clock.sleep(pause)
            pause = min(LOOK_SECONDS, 1.5 * pause)

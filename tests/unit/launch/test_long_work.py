"""Work that some ranks do while all wait: any length is taken, a worker that is gone is noticed. Ranks are threads here."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Any

import pytest

from shardwright.errors import ShardwrightError
from shardwright.launch import Heartbeat, LongWork, long_work
from shardwright.mesh.cluster_environment import RankInfo
from shardwright.torch_private import HashStore

RANKS = 4


@pytest.fixture(autouse=True)
def _one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of these tests are threads of one process."""
    monkeypatch.setattr(long_work, "_number", repeat(0))
    monkeypatch.setattr(long_work, "BEAT_SECONDS", 0.01)


class Ranks:
    """Four ranks on two hosts; ranks 0 and 2 work."""

    def __init__(self, timeout_seconds: float) -> None:
        store = HashStore()
        self.hearts = [Heartbeat() for _ in range(RANKS)]
        self.works = [
            LongWork(
                RankInfo(rank, rank % 2, RANKS, 2, 2, "torchrun"),
                (0, 2),
                "prepares the run",
                timeout_seconds,
                lambda: store,
                self.hearts[rank],
            )
            for rank in range(RANKS)
        ]

    def run(self, work: Any) -> list[Any]:
        """What each rank got: None, or its error."""

        def one(rank: int) -> Any:
            try:
                self.works[rank].run(lambda: work(rank))
            except (ShardwrightError, ValueError) as error:
                return error
            return None

        with ThreadPoolExecutor(RANKS) as threads:
            return list(threads.map(one, range(RANKS)))


def test_all_wait_for_every_worker_longer_than_the_time_out(capsys: Any, monkeypatch: Any) -> None:
    """The waiting ranks say once or twice a host what they wait for, and their hearts beat."""
    monkeypatch.setattr(long_work, "FIRST_WORD_SECONDS", 0.05)
    ranks, done = Ranks(timeout_seconds=1.0), []
    before = [heart.last().beats for heart in ranks.hearts]

    def work(rank: int) -> None:
        time.sleep(1.2 + 1.2 * (rank == 2))  # longer than timeout_seconds without an end
        done.append(rank)

    assert ranks.run(work) == [None] * RANKS and sorted(done) == [0, 2]
    errors = capsys.readouterr().err
    assert "rank 1 has waited 0 s for rank 0, which prepares the run." in errors
    assert "rank 0 has waited 0 s for rank 2, which prepares the run." in errors
    assert all(heart.last().beats > beats + 10 for heart, beats in zip(ranks.hearts, before))
    assert not [thread for thread in threading.enumerate() if thread.name == "long work"]


@pytest.mark.parametrize("gone", [0, 2])
def test_a_worker_that_is_gone_is_named_on_all_ranks(gone: int) -> None:
    def work(rank: int) -> None:
        if rank == gone:
            raise ValueError("this rank ends")

    found = Ranks(timeout_seconds=0.8).run(work)
    assert isinstance(found[gone], ValueError)
    others = [str(error) for rank, error in enumerate(found) if rank != gone]
    assert all(f"Rank {gone} prepares the run, and has given no sign of life for" in text for text in others), others


def test_work_without_an_end_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_work, "LIMIT_SECONDS", 0.1)
    ended = threading.Event()

    def work(rank: int) -> None:
        if rank == 0:
            ended.wait(1)

    found = Ranks(timeout_seconds=5).run(work)
    assert "Rank 0 prepares the run, and has not ended after 0 hours." in str(found[1])
    assert "Look at the output of that rank. `shardwright inspect" in str(found[3])

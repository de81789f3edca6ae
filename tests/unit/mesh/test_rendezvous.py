"""How ranks meet: what each waits for is said, what cannot be mended is refused, and a request to stop is heard."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import pytest

from shardwright.errors import ConfigError, ExitCode, ShardwrightError, StoppedEarly
from shardwright.mesh import rendezvous
from shardwright.mesh.cluster_environment import RankInfo
from shardwright.mesh.host_resources import HostResources
from shardwright.mesh.rendezvous import Rendezvous


@pytest.fixture(autouse=True)
def _one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of these tests are threads of one process."""
    monkeypatch.setattr(rendezvous, "_number", repeat(0))


@contextmanager
def taken() -> Iterator[int]:
    """A port at which something listens that says nothing."""
    with socket.create_server(("", 0)) as server:
        yield server.getsockname()[1]


def free() -> int:
    with taken() as port:
        return port


def never() -> bool:
    return False


def meeting(rank: int, port: int, ranks: int = 2, host: str = "127.0.0.1", **options: Any) -> Rendezvous:
    place = RankInfo(rank, rank, ranks, ranks, 1, "torchrun", host, port)
    return Rendezvous(place, options.get("environment", {}), 10, options.get("stop", never))


def resources(rank: int) -> HostResources:
    return HostResources("here" if rank < 2 else "there", (rank, 9), devices=(f"GPU-{rank}",))


def meet(rank: int, port: int, **options: Any) -> tuple[Rendezvous, Any]:
    """The meeting, and the all_resources or the error that the rank gets."""
    made = meeting(rank, port, **options)
    try:
        return made, made.exchange(resources(rank))
    except ShardwrightError as error:
        return made, error


def after(times: int) -> Callable[[], bool]:
    """A request to stop that comes when it has been asked for so many times."""
    asked = iter(range(times))
    return lambda: next(asked, None) is None


def test_ranks_meet_and_another_run_is_refused() -> None:
    """Three find each other. A second rank 1, a rank of four and one of another job come to the same port."""
    port = free()
    with ThreadPoolExecutor(3) as threads:
        met = list(threads.map(lambda rank: meet(rank, port, ranks=3), range(3)))
    assert [all_resources for _, all_resources in met] == [[resources(0), resources(1), resources(2)]] * 3
    assert all(made.holds_store for made, _ in met)
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port} belongs to another run, which has a rank 1 already"):
        meeting(1, port, ranks=3).exchange(resources(1))
    with pytest.raises(ConfigError, match=r'another run \(\{"world_size": 3.*this is \{"world_size": 4'):
        meeting(1, port, ranks=4).exchange(resources(1))
    with pytest.raises(ConfigError, match=r'this is .*"SLURM_JOB_ID": "7"'):
        meeting(2, port, ranks=3, environment={"SLURM_JOB_ID": "7"}).exchange(resources(2))
    with pytest.raises(ConfigError, match=f"Port {port} of this machine is taken"):
        meeting(0, port, ranks=3)


def test_a_rank_that_is_missing_is_named_and_a_request_to_stop_is_heard(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(rendezvous, "FIRST_WORD_SECONDS", 0.001)
    met, error = meet(0, free(), ranks=3, stop=after(30))
    assert met.store.check(["run"]) and isinstance(error, StoppedEarly)
    assert error.exit_code == ExitCode.STOPPED_AND_SAVED
    assert str(error) == "Asked to stop while waiting for 2 of 3 ranks: 1, 2. There is nothing to save."
    assert "rank 0 has waited 0 s for 2 of 3 ranks: 1, 2." in capsys.readouterr().err
    monkeypatch.setattr(rendezvous, "JOIN_SECONDS", 0)
    made = meeting(0, free(), ranks=2)
    made._seconds = 0.01
    with pytest.raises(ShardwrightError, match=r"has waited 0.01 s for 1 of 2 ranks: 1\. All ranks must start"):
        made.exchange(resources(0))


def test_a_host_that_is_unknown_or_does_not_answer(capsys: Any, monkeypatch: Any) -> None:
    """Both are said while the rank waits. An unknown one is given up sooner."""
    monkeypatch.setattr(rendezvous, "FIRST_WORD_SECONDS", 0.001)
    with pytest.raises(StoppedEarly, match=r"waiting for rank 0 at 127.0.0.1:\d+ \(Connection refused\)"):
        meeting(1, free(), stop=lambda: "refused" in capsys.readouterr().err)
    with (
        taken() as port,
        pytest.raises(StoppedEarly, match="where perhaps another program than shardwright listens"),
    ):
        meeting(1, port, stop=lambda: "than shardwright listens" in capsys.readouterr().err)
    monkeypatch.setattr(rendezvous, "NAME_SECONDS", 0)
    with pytest.raises(ConfigError, match=r"The host no-such-host.invalid is unknown \(.*Set MASTER_ADDR"):
        meeting(1, 4711, host="no-such-host.invalid")


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 0), ("127.0.0.1", 65536), ("", 4711)])
def test_no_place_to_meet(host: str, port: int) -> None:
    with pytest.raises(ConfigError, match="is no address where ranks can meet"):
        meeting(0, port, host=host)


def test_torchruns_own_store_is_held_by_torchrun() -> None:
    """Its agent listens at the master's port: no rank does, and a restart finds no trace of the start before."""
    from datetime import timedelta

    from torch._C._distributed_c10d import TCPStore

    agent = TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=20), False)
    for restart in ("0", "1"):
        environment = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": restart}
        with ThreadPoolExecutor(2) as threads:
            asked = [threads.submit(meet, rank, agent.port, environment=environment) for rank in range(2)]
        met = [one.result() for one in asked]
        assert [all_resources for _, all_resources in met] == [[resources(0), resources(1)]] * 2
        assert not any(made.holds_store for made, _ in met)

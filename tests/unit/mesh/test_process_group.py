"""The connection of a single process, and its self-test. Covers A14 and A135."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.started import LIMIT

from shardwright.errors import ShardwrightError
from shardwright.mesh.process_group import connect, self_test


def _reductions(monkeypatch: pytest.MonkeyPatch, reduced: float, scattered: float) -> None:
    """Rank 1 of 3 in a group whose collectives give these values."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op: tensor.fill_(reduced))
    for name in ("reduce_scatter_single", "reduce_scatter_tensor"):
        monkeypatch.setattr(dist, name, lambda out, pieces, op: out.fill_(scattered), raising=False)


def test_sum_that_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """A14: 1 + 2 + 3 = 6; rank 1 gets the second of the pieces 1, 2, 3 times 6."""
    _reductions(monkeypatch, 6.0, 12.0)
    self_test(torch.device("cpu"))


@pytest.mark.parametrize(
    ("reduced", "scattered", "text"),
    [
        (2.0, 12.0, r"all_reduce with SUM over 3 ranks gives 2 where 6 is right \(it averages\)"),
        (6.0, 4.0, r"reduce_scatter with SUM over 3 ranks gives 4 where 12 is right \(it averages\)"),
        (6.0, 6.0, r"reduce_scatter with SUM over 3 ranks gives 6 where 12 is right\. Gradients"),
    ],
)
def test_sum_that_does_not(monkeypatch: pytest.MonkeyPatch, reduced: float, scattered: float, text: str) -> None:
    """A14: a reduction that does not do what its name says is refused at the start."""
    _reductions(monkeypatch, reduced, scattered)
    with pytest.raises(ShardwrightError, match=text):
        self_test(torch.device("cpu"))


SINGLE = """
import ctypes, resource, torch, torch.distributed as dist
from shardwright.mesh.process_group import connect
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        block = libc.malloc(2**26)
        ctypes.memset(block, 1, 2**26)
        libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
before = faults()
with connect("cpu", 30, 1) as connection:
    faults()
    after = faults()
    assert connection.rank_info.started_by == "single" and dist.get_world_size() == 1
    assert connection.threads == torch.get_num_threads() == 1
    assert connection.configuration()["keeps_freed_blocks"] is connection.keeps_freed_blocks
assert not dist.is_initialized()
print(connection.keeps_freed_blocks, before, after)
"""


def _run(environment: dict[str, str]) -> tuple[bool, int, int]:
    import os

    dropped = ("MALLOC_", "LOCAL_RANK", "SLURM_", "SHARDWRIGHT_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", SINGLE],
        env=kept | paths | environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    keeps, before, after = done.stdout.split()
    return keeps == "True", int(before), int(after)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_single_process_keeps_freed_blocks() -> None:
    """A 64 MiB block faults 16384 pages (of 4 KiB) each time when it is mapped, and none when it is kept."""
    keeps, before, after = _run({})
    assert keeps
    assert before > 10000 * 5 or before > 100  # fewer where the kernel uses huge pages
    assert after < before / 50


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_the_users_malloc_thresholds_are_kept() -> None:
    keeps, before, after = _run({"MALLOC_MMAP_THRESHOLD_": "65536"})
    assert not keeps
    assert after > before / 2


def test_a_single_process_can_join_again_after_an_error() -> None:
    for _ in range(2):
        with (
            pytest.raises(RuntimeError, match="mine"),
            connect("cpu", 30, torch.get_num_threads()) as connection,
        ):
            value: Any = torch.ones(1)
            dist.all_reduce(value)
            assert value.item() == 1 and connection.device.type == "cpu"
            raise RuntimeError("mine")
    assert not dist.is_initialized()

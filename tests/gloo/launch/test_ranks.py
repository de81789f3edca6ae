"""The helper that starts ranks: results, failures, deaths and time-outs. Covers no known fault."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from tests.gloo.ranks import run_ranks
from tests.started import LIMIT

pytestmark = [pytest.mark.gloo, pytest.mark.slow]


def _sum(offset: int) -> tuple[int, torch.Tensor]:
    value = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(value)
    return dist.get_rank(), value


def _one_raises() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one has had enough")
    dist.barrier()


def _one_dies() -> None:
    if dist.get_rank() == 0:
        os._exit(7)
    time.sleep(2 * LIMIT)


def test_results_come_back_in_the_order_of_ranks() -> None:
    results = run_ranks(_sum, 3, 10)
    assert [rank for rank, _ in results] == [0, 1, 2]
    assert all(value.item() == 33.0 for _, value in results)


def test_a_failing_rank_ends_all_with_its_traceback() -> None:
    with pytest.raises(AssertionError, match=r"rank 1 failed:[\s\S]*rank one has had enough"):
        run_ranks(_one_raises, 2)


def test_a_dead_rank_ends_all() -> None:
    with pytest.raises(AssertionError, match="rank 0 failed:\nended with exit code 7"):
        run_ranks(_one_dies, 2)


def test_a_rank_that_hangs_is_ended() -> None:
    with pytest.raises(AssertionError, match="no result after 8 s"):
        run_ranks(time.sleep, 1, 2 * LIMIT, timeout=8.0)

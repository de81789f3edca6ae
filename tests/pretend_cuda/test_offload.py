"""Shards on the host, on two pretend GPUs: trained, saved, resumed, evaluated, exported, under every layout that shards.

The ranks are tasks of Slurm that see one GPU each, as `srun --gpus-per-task=1` starts them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import tolerance
from tests.places import ROOT
from tests.pretend_cuda.running import environment, needs_pretend_cuda, pretend
from tests.started import LIMIT

pytestmark = [needs_pretend_cuda, pytest.mark.slow]
RANKS = 2
ROUNDING = tolerance.of_blocks(4, torch.float32)
"""Of a loss of examples/tiny, which has 4 blocks: shards on the host are summed and stepped by other code."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("offload")
    violations = directory / "violations.txt"
    shared = {
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NUM_TASKS": str(RANKS), "SLURM_NTASKS_PER_NODE": str(RANKS),
        "SLURM_NNODES": "1", "PRETEND_CUDA_VIOLATIONS": str(violations),
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.pretend_cuda.offloaded", str(directory)],
            cwd=ROOT,
            env=environment(1)
            | shared
            | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "CUDA_VISIBLE_DEVICES": f"{3 * rank + 1}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    ended = [rank.communicate(timeout=LIMIT) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * RANKS, "\n".join(errors[-3000:] for _, errors in ended)
    assert not violations.exists(), violations.read_text()[:3000]
    told = next(line for line in ended[0][0].splitlines() if line.startswith("OFFLOADED "))
    return json.loads(told.removeprefix("OFFLOADED "))


def test_each_task_has_the_gpu_that_it_sees(found: dict[str, Any]) -> None:
    """`srun --gpus-per-task=1`: the only visible GPU has index 0 in every task, whatever the task's number."""
    assert found["devices"] == ["cuda:0"] * RANKS


def test_no_communicator_has_one_rank(found: dict[str, Any]) -> None:
    """NCCL's communicators take memory of the GPU. Five axes of one rank or more, in eleven meshes."""
    assert found["communicators"] == [RANKS]


def test_shards_and_states_are_on_the_host_and_buffers_on_the_gpu(found: dict[str, Any]) -> None:
    """[device, pinned]: a copy from memory that is not pinned holds up the GPU's queue."""
    assert found["places"] == {
        "parameters": [["cpu", True]],
        "buffers": [["cuda", False]],
        "optimizer": [["cpu", False]],
    }


def test_losses_are_those_of_shards_on_the_gpu(found: dict[str, Any]) -> None:
    """From the beginning, after a resume with shards on the GPU, and after another with shards on the host again."""
    right = found["losses"]["on GPU"]
    for name, losses in found["losses"].items():
        assert losses == {update: pytest.approx(right[update], rel=ROUNDING) for update in losses}, name
    assert [len(losses) for losses in found["losses"].values()] == [4, 4, 2, 2, 1]


def test_a_resume_is_bitwise(found: dict[str, Any]) -> None:
    """Weights and moments of the last checkpoint, on every rank."""
    assert found["resumed bitwise"] == [True] * RANKS
    whole, resumed = found["losses"]["on host"], found["losses"]["resumed"]
    assert resumed == {update: whole[update] for update in resumed}


def test_evaluated_and_exported(found: dict[str, Any]) -> None:
    on_gpu, on_host = found["evaluations"]
    assert on_host == pytest.approx(on_gpu, rel=ROUNDING)
    on_host, from_checkpoint = found["exports"]  # the other: from the last checkpoint, with shards on the GPU
    assert on_host == from_checkpoint and len(on_host) > 30


def test_every_layout_that_shards(found: dict[str, Any]) -> None:
    right = list(found["losses"]["on GPU"].values())
    for name, losses in found["layouts"].items():
        assert losses == pytest.approx(right, rel=ROUNDING), name


def test_an_update_waits_once_a_backward_and_once_to_decide(tmp_path: Path) -> None:
    """Gradients are needed on the host after each backward; no copy of an update uses memory that is not pinned."""
    ran = pretend(
        "train", "examples/tiny.yaml", "--training.max_steps", "2", "--hardware.device", "cuda", "--nproc-per-node", "1",
        "--parallelism.data_parallel", "zero3", "--memory.cpu_offload", "params", "--checkpoint.output_dir", str(tmp_path),
        devices=1, timeout=LIMIT,
    )  # fmt: skip
    assert ran.code == 0, ran.output[-3000:]
    microbatches = 8
    assert ran.waits(1) == microbatches + 1, ran.stacks(1)
    pageable = [(what, stack) for kind, what, stack, _ in ran.notes[1] if kind == "pageable"]
    assert all("_step_on_host" in stack for _, stack in pageable), pageable

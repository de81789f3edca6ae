"""On one GPU: the same engine over NCCL. Skipped, with the reason, where there is none. Rows A41, A74, A105, A109, A128."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from tests import tolerance
from tests.places import ROOT

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device on this machine"),
]
needs_cuda_build = pytest.mark.skipif(
    torch.version.cuda is None, reason="torch.compile and torch's CUDA sanitizer need a CUDA build of torch"
)

ROUNDING = {
    "fp32": tolerance.positive(*[64, 64, 176] * 7 * 4, dtype=torch.float32),
    "bf16": tolerance.of_blocks(4, torch.bfloat16),
}
"""Of a loss of examples/tiny: 4 blocks of 7 matrices, each sums 64 to 176 terms in three ways; a mean over targets."""


def shardwright(*arguments: str, more: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """more: variables of the environment."""
    command, variables = [sys.executable, "-m", "shardwright", *arguments], {**os.environ, **(more or {})}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=variables)


def metrics(output_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero2", "zero3"])
def test_losses_equal_those_of_the_cpu(layout: str, tmp_path: Path) -> None:
    """One GPU and one CPU process see the same rows and weights: float32 losses agree to rounding."""
    losses = {}
    for device in ("cuda", "cpu"):
        output = tmp_path / device
        done = shardwright(
            "train", "examples/tiny.yaml", "--training.max_steps", "5", "--hardware.device", device,
            "--parallelism.data_parallel", layout, "--checkpoint.output_dir", str(output),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        losses[device] = [entry["train/loss"] for entry in metrics(output)]
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=ROUNDING["fp32"])


@pytest.mark.timeout(400)
def test_memory_is_reported_by_name(tmp_path: Path) -> None:
    """A109: reserved is at least allocated, and both are there on a GPU."""
    done = shardwright(
        "train", "examples/tiny.yaml", "--training.max_steps", "3", "--checkpoint.output_dir", str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    last = metrics(tmp_path)[-1]
    assert last["mem/peak_reserved_bytes"] >= last["mem/peak_allocated_bytes"] > 0


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        (["--precision.param_dtype", "bf16"], "bf16"),
        (["--memory.cpu_offload", "params"], "fp32"),
        pytest.param(["--memory.compile", "true"], "fp32", marks=needs_cuda_build),
    ],
    ids=["bf16", "offload", "compiled"],
)
def test_variants_are_near_float32(variant: list[str], dtype: str, tmp_path: Path) -> None:
    """bf16 compute over fp32 masters, shards on the host, and compiled blocks, against the plain float32 run."""
    losses = []
    for options in ([], variant):
        output = tmp_path / str(len(options))
        done = shardwright(
            "train", "examples/tiny.yaml", "--training.max_steps", "5", "--checkpoint.output_dir", str(output), *options,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        losses.append([entry["train/loss"] for entry in metrics(output)])
        assert all(math.isfinite(loss) for loss in losses[-1])
    assert losses[1] == pytest.approx(losses[0], rel=ROUNDING[dtype])


def check_resume(tmp_path: Path, *options: str) -> None:
    """A checkpoint taken at update 3 continues as if nothing had happened."""
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    common = ["train", "examples/tiny.yaml", "--training.max_steps", "6", "--checkpoint.save_steps", "3", *options]
    assert shardwright(*common, "--checkpoint.output_dir", str(whole)).returncode == 0
    halves.mkdir()
    (whole / "checkpoint-3").rename(halves / "checkpoint-3")
    assert shardwright(*common, "--checkpoint.output_dir", str(halves)).returncode == 0
    tail = [entry["train/loss"] for entry in metrics(whole)][3:]
    assert [entry["train/loss"] for entry in metrics(halves)] == tail


@pytest.mark.timeout(400)
@pytest.mark.parametrize("beside", ["false", "true"])
def test_resume_on_the_gpu_is_bit_identical(beside: str, tmp_path: Path) -> None:
    """A74: after a save at once, and after a save beside training."""
    check_resume(tmp_path, "--checkpoint.async_save", beside)


@pytest.mark.timeout(400)
def test_resume_with_offload_is_bit_identical(tmp_path: Path) -> None:
    """A74: with shards and optimizer states on the host, saved beside training."""
    offload = ("--parallelism.data_parallel", "zero3", "--memory.cpu_offload", "params")
    check_resume(tmp_path, "--checkpoint.async_save", "true", *offload)


@pytest.mark.timeout(400)
@needs_cuda_build
@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_streams_are_ordered(layout: str, tmp_path: Path) -> None:
    """Under torch's CUDA sanitizer: no kernel reads what another stream may still write, with gathers, prefetch and a save."""
    ranks = min(2, torch.cuda.device_count())
    done = shardwright(
        "train", "examples/tiny.yaml", "--training.max_steps", "4", "--parallelism.data_parallel", layout,
        "--checkpoint.save_steps", "2", "--checkpoint.async_save", "true", "--checkpoint.output_dir", str(tmp_path),
        "--nproc-per-node", str(ranks), more={"TORCH_CUDA_SANITIZER": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "CSAN detected a possible data race" not in done.stdout + done.stderr

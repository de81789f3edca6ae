"""Training on pretend GPUs beside the CPU, and a run with its shards on the host that is stopped and resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests import tolerance
from tests.pretend_cuda.running import Ran, needs_pretend_cuda, pretend, pretend_ranks
from tests.pretend_cuda.sweep import CASES, UPDATES
from tests.started import PATIENCE
from torch import bfloat16, float32

pytestmark = [needs_pretend_cuda, pytest.mark.slow, pytest.mark.timeout(600 * PATIENCE)]

ROUNDING = {
    "fp32": tolerance.positive(*[64, 64, 176] * 7 * 4, dtype=float32),
    "bf16": tolerance.of_blocks(4, bfloat16),
}
"""Of a loss of examples/tiny: 4 blocks of 7 matrices, each sums 64 to 176 terms; attention is another kernel than the CPU's."""


@pytest.fixture(scope="module")
def losses() -> dict[str, dict[str, list[float]]]:
    ran = pretend_ranks("tests.pretend_cuda.sweep", timeout=500 * PATIENCE)
    assert ran.code == 0, ran.output[-4000:]
    assert not ran.violations, "\n".join(ran.violations[:5])
    told = next(line for line in ran.output.splitlines() if line.startswith("SWEEP "))
    return json.loads(told.removeprefix("SWEEP "))


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_the_cpu(case: str, losses: dict[str, dict[str, list[float]]]) -> None:
    found, right = losses[case]["cuda"], losses[case]["cpu"]
    narrow = "bf16" in (CASES[case].get("param"), CASES[case].get("reduce"))
    assert len(found) == UPDATES + ("evaluate" in CASES[case])
    assert found == pytest.approx(right, rel=ROUNDING["bf16" if narrow else "fp32"])


def train(output: Path, *more: str) -> Ran:
    ran = pretend(
        "train", "examples/tiny.yaml", "--training.max_steps", "4", "--checkpoint.save_steps", "2",
        "--hardware.device", "cuda", "--nproc-per-node", "2", "--checkpoint.output_dir", str(output), *more,
        timeout=200 * PATIENCE,
    )  # fmt: skip
    assert ran.code == 0, ran.output[-4000:]
    assert not ran.violations, "\n".join(ran.violations[:5])
    return ran


def test_buffers_that_a_constructor_computes_are_on_the_device(tmp_path: Path) -> None:
    """Under ddp nothing but `materialise` moves them."""
    train(
        tmp_path, "--model.model_name_or_path", "tests.odd_models:computed_buffer", "--parallelism.data_parallel", "ddp"
    )

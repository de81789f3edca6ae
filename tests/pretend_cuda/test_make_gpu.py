"""`make gpu` rehearsed: its training part on one pretend GPU, from the model's size to the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.pretend_cuda.running import needs_pretend_cuda, run_on_pretend_gpus
from tests.started import PATIENCE

pytestmark = [needs_pretend_cuda, pytest.mark.slow, pytest.mark.timeout(1000 * PATIENCE)]


def test_training_is_rehearsed(tmp_path: Path) -> None:
    """Every eager case has its figures, memory is near the plan, and what cannot run says why; no rule of CUDA is broken."""
    program = ["benchmarks/gpu.py", "--rehearse", "--parts", "training 8B-wide", "--output", str(tmp_path / "gpu.json")]
    ran = run_on_pretend_gpus(program, 1, None, 900 * PATIENCE, None)
    assert ran.code == 0 and not ran.violations, ran.output
    (part,) = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    figures = part["figures"]
    timed = {figure["case"] for figure in figures if figure["name"] == "tokens"}
    assert len(timed) == 4 and all("eager" in case for case in timed)
    left_out = [figure["name"] for figure in figures if figure["median"] is None]
    assert left_out == ["left out: torch.compile has no kernels for the pretend device"] * 2
    for figure in figures:
        if figure["name"] == "allocated" and figure["beside"] is not None:
            # tolerance: at sizes this small, tables and buffers that no plan counts are a twentieth of the peak
            assert figure["median"] == pytest.approx(figure["beside"], rel=0.1)
    losses = [figure["median"] for figure in figures if figure["name"] == "first loss"]
    assert max(losses) - min(losses) < 0.1
    assert "REHEARSAL" in (tmp_path / "gpu.md").read_text()

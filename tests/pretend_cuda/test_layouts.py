"""Every layout on pretend GPUs, in float64: equal to one process, and no breach of CUDA's rules."""

from __future__ import annotations

import pytest
from tests.places import EXAMPLES
from tests.pretend_cuda.running import needs_pretend_cuda, pretend
from tests.started import PATIENCE

from shardwright.config.load import load_run_file
from shardwright.layout.names import every_layout
from shardwright.tools.drill.reshard import possible_layouts

pytestmark = [needs_pretend_cuda, pytest.mark.slow, pytest.mark.timeout(600 * PATIENCE)]


SMALL = '{"hidden_size": 32, "intermediate_size": 40, "head_dim": 8}'


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_layouts_are_equal(ranks: int) -> None:
    """On 4 ranks those that 2 ranks cannot have."""
    loaded = load_run_file(EXAMPLES / "tiny.yaml")
    layouts = [layout for layout in possible_layouts(loaded, ranks) if ranks == 2 or layout not in every_layout(2)]
    assert len(layouts) > 10
    ran = pretend(
        "check", "examples/tiny.yaml", "--layouts", ",".join(layouts), "--nproc-per-node", str(ranks),
        "--updates", "2", "--hardware.device", "cuda", "--model.config_overrides", SMALL, devices=ranks, timeout=500 * PATIENCE,
    )  # fmt: skip
    assert ran.code == 0, ran.output[-4000:]
    assert not ran.violations, "\n".join(ran.violations[:5])

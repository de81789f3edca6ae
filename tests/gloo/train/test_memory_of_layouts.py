"""Peak memory of tensors, measured on gloo ranks, beside what the planner says, under every way to split.

Known-fault rows: A109 (peaks by phase), A112 (gradients at rest).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.gloo.engine import LLAMA, batches_for, make_engine, run_file
from tests.gloo.ranks import run_ranks
from torch import Tensor

from shardwright.arch.config_json import shape_from_config
from shardwright.config.load import Loaded
from shardwright.layout.legality import check_run
from shardwright.layout.names import with_layout
from shardwright.measure.live_memory import LiveMemory, MemoryPeak
from shardwright.planner.memory_peak import short_peak
from shardwright.planner.problem import layout_of, problem_of

pytestmark = [pytest.mark.gloo, pytest.mark.slow]
RANKS, LENGTH, VOCABULARY = 4, 64, 1024
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
}
LAYOUTS = ("ddp", "zero1", "hsdp2", "ddp+tp2", "zero3+tp2", "zero2+pp2+tp2")
EXCHANGED = ("zero2", "zero3", "zero3+pp2", "zero3+cp2")
"""Gradients are reduced at every microbatch: gloo's exchange keeps two units of them into the next forward."""
EVERY = (*LAYOUTS, *EXCHANGED)


def loaded(name: str) -> Loaded:
    fp32 = {f"precision__{part}_dtype": "fp32" for part in ("param", "reduce", "master")}
    run = run_file(
        LLAMA,
        model__config_overrides=SIZES,
        data__max_length=LENGTH,
        training__global_batch_size=16,
        training__per_device_train_batch_size=2,
        **fp32,
    )
    return with_layout(run, name)


def _peaks(names: tuple[str, ...]) -> dict[str, tuple[MemoryPeak, dict[str, int]]]:
    """(fullest moment of the second update, bytes by phase) on this rank."""
    found = {}
    for name in names:
        memory = LiveMemory(VOCABULARY)
        with memory:
            engine = make_engine(loaded(name))
            memory.label("parameters", engine.module.parameters())
            engine.hooks.on_phase = lambda phase, memory=memory: memory.enter("update")  # type: ignore[misc]
            for update in range(2):
                batch = batches_for(engine, update, length=LENGTH, rows=16)
                memory.clear()
                memory.enter("forward")
                engine.forward_backward(batch)
                memory.label("gradients", (gradient for _, gradient in engine.gradients()))
                engine.step()
                states = engine.optimizer.state.values()
                memory.label("optimizer states", (v for s in states for v in s.values() if isinstance(v, Tensor)))
        found[name] = (memory.peak(), memory.peak_by_phase)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, tuple[MemoryPeak, dict[str, int]]]]:
    return run_ranks(_peaks, RANKS, EVERY)


def planned(name: str) -> Any:
    run = loaded(name).run
    config = json.loads((Path(LLAMA) / "config.json").read_text()) | SIZES
    layout = layout_of(run, check_run(loaded(name), RANKS), "cpu")
    return short_peak(problem_of(run, shape_from_config(config), "cpu"), layout)


@pytest.mark.parametrize("name", EVERY)
def test_the_plan_is_within_a_tenth(name: str, ranks: list[dict[str, tuple[MemoryPeak, dict[str, int]]]]) -> None:
    """Of the fullest rank. Model states are what the planner says to 2%: A112, gradients at rest among them."""
    most = max((rank[name][0] for rank in ranks), key=lambda peak: peak.bytes)
    plan = planned(name)
    # tolerance: what is planned of a peak, to a tenth
    assert plan.allocated == pytest.approx(most.bytes, rel=0.10), (most, plan)
    for part in ("parameters", "optimizer states"):
        # tolerance: what is planned of a part that rests, to a fiftieth
        assert most.composition[part] == pytest.approx(plan.composition[part], rel=0.02), part


def test_phases(ranks: list[dict[str, tuple[MemoryPeak, dict[str, int]]]]) -> None:
    """A109: forward, backward and update have highs of their own, and the peak is the highest of them."""
    for peak, phases in (rank[name] for rank in ranks for name in EVERY):
        assert {"backward", "update"} <= set(phases) <= {"forward", "backward", "update"}
        assert peak.bytes == max(phases.values()) == phases[peak.phase]

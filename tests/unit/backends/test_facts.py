"""Which backend serves a kind of device, with the package for gloo and without it."""

from __future__ import annotations

from tests.stock_torch import without_gloo_package

from shardwright.backends.backend import Backend, choose_backend
from shardwright.backends.facts import GLOO_FACTS, TORCH_FACTS, backend_facts
from shardwright.backends.gloo.backend import GlooBackend


def test_cpus_have_a_backend_of_ours_and_gpus_have_torchs() -> None:
    assert type(choose_backend("cpu")) is GlooBackend and backend_facts("cpu") is GLOO_FACTS
    assert type(choose_backend("cuda")) is Backend and backend_facts("cuda") is TORCH_FACTS


def test_without_the_package_torch_serves_everywhere() -> None:
    with without_gloo_package():
        for device in ("cpu", "cuda"):
            assert type(choose_backend(device)) is Backend and backend_facts(device) is TORCH_FACTS
    assert type(choose_backend("cpu")) is GlooBackend


def test_zero_bubble_schedules_are_torchs() -> None:
    """Their backward comes in two parts, which only torch's own stages compute."""
    runtimes = {name: choose_backend("cpu").pipeline_runtime(name) for name in ("gpipe", "1f1b", "zero_bubble", "zbv")}
    assert [name for name, runtime in runtimes.items() if runtime is None] == ["zero_bubble", "zbv"]


def test_attention_in_float32_is_for_short_rows_in_bf16_on_cpus() -> None:
    assert GLOO_FACTS.backward_in_float32("bf16", 256, 128) and not GLOO_FACTS.backward_in_float32("bf16", 257, 128)
    assert not GLOO_FACTS.backward_in_float32("fp32", 1, 1) and not TORCH_FACTS.backward_in_float32("bf16", 1, 1)


def test_freed_blocks_are_told_of_once() -> None:
    """What the user has set stays; a rank reads from its environment what its launcher has set."""
    assert not GLOO_FACTS.rank_environment({"MALLOC_MMAP_THRESHOLD_": "65536"})
    assert not any("MALLOC" in name for name in TORCH_FACTS.rank_environment({}))
    assert not TORCH_FACTS.keep_freed_blocks({})
    assert GLOO_FACTS.keep_freed_blocks(GLOO_FACTS.environment)
    assert not GLOO_FACTS.keep_freed_blocks({"MALLOC_MMAP_THRESHOLD_": "65536"})

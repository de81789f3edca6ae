"""The search against brute force over all legal layouts; what fits, what does not, and what is said first."""

from __future__ import annotations

import pytest

from shardwright.arch.known_models import known_shape
from shardwright.arch.shape import generic_shape
from shardwright.planner.advice import approach_of, first_to_test, remaining_limits, what_would_fit
from shardwright.planner.answer import answer
from shardwright.planner.hardware import find_device
from shardwright.planner.memory_peak import short_peak
from shardwright.planner.problem import Problem
from shardwright.planner.rank_bytes import blocks_per_stage
from shardwright.planner.search import FAR, Search
from shardwright.planner.space import (
    ON_DEVICE,
    PREFETCH,
    RECOMPUTE,
    UNITS,
    count_layouts,
    kinds_of,
    layout_groups,
    mesh_shapes,
    shardings,
    variant,
    variants,
)


def make(model: str, devices: int, length: int, batch: int, device: str = "h100-sxm-80gb") -> Search:
    return Search(Problem(known_shape(model), length, batch, device=find_device(device)), devices)


@pytest.mark.parametrize(
    ("model", "devices", "length", "batch", "device"),
    [
        ("llama-3.2-1b", 4, 4096, 8, "rtx4090-24gb"),
        ("llama-3-8b", 8, 4096, 8, "a100-sxm-80gb"),
        ("llama-2-13b", 16, 2048, 16, "a100-sxm-40gb"),
    ],
)
def test_equals_brute_force(model: str, devices: int, length: int, batch: int, device: str) -> None:
    """Every legal layout timed and weighed one by one gives no faster one in any family that the search looks
    at closely.
    """
    search = make(model, devices, length, batch, device)
    found = search.run()
    other = make(model, devices, length, batch, device)
    legal, _ = mesh_shapes(other.problem, devices)
    best: dict[str, float] = {}
    for mesh_shape in legal:
        for layout_group in layout_groups(other.problem, mesh_shape):
            blocks = blocks_per_stage(other.problem.shape, mesh_shape.pp * layout_group.chunks)
            for kind in set(kinds_of(layout_group)) & set(ON_DEVICE):
                family = f"{kind}+{mesh_shape.family}" if mesh_shape.family else kind
                for layout in variants(layout_group, kind):
                    seconds = other.clock.step(layout, blocks).total
                    if seconds < best.get(family, 1e30) and other.needs(layout)[1] <= other.capacity:
                        best[family] = seconds
    assert set(best) == set(found.best)
    fastest = min(best.values())
    for family, seconds in best.items():
        layout = found.best[family].layout
        mine = search.clock.step(layout, found.best[family].stage_blocks).total
        if seconds <= FAR * fastest:
            assert mine <= seconds * 1.0001, family
    assert not set(found.rejected) & set(best)


def test_considered_counts_every_layout_once() -> None:
    problem = Problem(known_shape("llama-3.2-1b"), 4096, 8)
    legal, _ = mesh_shapes(problem, 8)
    total = 0
    for mesh_shape in legal:
        seen = set()
        for layout_group in layout_groups(problem, mesh_shape):
            for kind in kinds_of(layout_group):
                for layout in variants(layout_group, kind):
                    choices = len(UNITS) * len(PREFETCH) if layout.data_parallel == "zero3" else 1
                    seen.add(layout)
                    total += choices
        assert len(seen) == len(set(seen))
    assert total == sum(count_layouts(8 // s.data, s.data, s.cp, s.pp, problem.shape.layers) for s in legal)


def test_all_layouts_keep_the_objective_and_use_all_devices() -> None:
    problem = Problem(known_shape("llama-3-8b"), 8192, 24)
    legal, illegal = mesh_shapes(problem, 12)
    assert any("rows of an update" in reason for reason in illegal) or all(24 % s.data == 0 for s in legal)
    for mesh_shape in legal:
        assert mesh_shape.tp * mesh_shape.cp * mesh_shape.pp * mesh_shape.data == 12
        for layout_group in layout_groups(problem, mesh_shape):
            assert layout_group.microbatch_rows * layout_group.microbatches * mesh_shape.data == 24
            for kind in kinds_of(layout_group):
                for layout in variants(layout_group, kind):
                    assert layout.axes.world_size == 12
                    assert layout.microbatches(problem) == layout_group.microbatches


def test_heads_are_never_cut() -> None:
    shape = generic_shape(layers=4, hidden=768, heads=12, kv_heads=4, vocab=100, ffn=3072)
    assert {mesh_shape.tp for mesh_shape in mesh_shapes(Problem(shape, 1024, 64), 64)[0]} == {1, 2, 4}


def test_fsdp_first_for_70b_on_64() -> None:
    search = make("llama-3-70b", 64, 4096, 256)
    a = answer(search)
    assert a.fits and a.path == "fsdp" and a.first is not None
    assert a.first.keys["parallelism.data_parallel"] == "zero3" and a.first.device_bytes <= a.capacity_bytes
    assert 0.25 < a.first.mfu < 0.6
    assert {r.family for r in a.rejected} >= {"ddp", "zero1", "zero2"}
    assert any("padding" in line for line in a.limits)


def test_ddp_first_when_a_useful_batch_fits() -> None:
    search = make("llama-3.2-1b", 8, 2048, 64)
    first = first_to_test(search, search.run())
    assert first is not None and approach_of(first.layout) == "ddp"


def test_context_parallel_enters_for_long_rows() -> None:
    a = answer(make("llama-3.1-8b", 64, 131072, 64))
    assert a.first is not None and a.first.keys["parallelism.cp_size"] >= 4


def test_rows_are_not_split_where_plain_fsdp_is_close() -> None:
    """The fastest zero3 layout of this problem splits rows over two ranks; the simpler one is within a quarter of
    it.
    """
    search = make("llama-3-70b", 16, 8192, 64, "mi300x-192gb")
    found = search.run()
    assert found.best["zero3"].layout.axes.cp == 2
    first = first_to_test(search, found)
    assert first is not None and first.layout.axes.cp == 1 and approach_of(first.layout) == "fsdp"
    assert first.seconds < 1.25 * found.best["zero3"].seconds


def test_nothing_fits_and_what_would() -> None:
    search = make("llama-2-7b", 1, 4096, 64, "rtx4090-24gb")
    a = answer(search)
    assert not a.fits and a.first is None
    text = " ".join(a.would_fit)
    assert "8 devices instead of 1" in text and "cpu_offload" in text and "LoRA" in text
    assert make("llama-2-7b", 8, 4096, 64, "rtx4090-24gb").run().best, "the advice must be true"
    assert not make("llama-2-7b", 4, 4096, 64, "rtx4090-24gb").run().best, "and the nearest"


def test_a_unit_that_does_not_fit_is_said() -> None:
    shape = generic_shape(layers=2, hidden=65536, heads=512, vocab=1000, ffn=262144)
    search = Search(Problem(shape, 1024, 8, device=find_device("rtx4090-24gb")), 8)
    assert not search.run().best
    assert next(what_would_fit(search)).startswith("Even one unit does not fit")


def test_long_sequence_activations_are_named_as_not_fixed() -> None:
    search = make("llama-3-8b", 8, 8192, 64)
    first = first_to_test(search, search.run())
    assert first is not None
    peak = short_peak(search.problem, first.layout)
    lines = list(remaining_limits(search, first, peak.composition, peak.allocated))
    assert any(line.startswith("Activations: ") and "FSDP does not divide activations" in line for line in lines)


def test_a_shown_peak_is_within_the_device() -> None:
    for model, devices, length, batch in (("llama-3-70b", 64, 4096, 128), ("llama-3.1-8b", 64, 131072, 64)):
        search = make(model, devices, length, batch)
        for choice in search.run().best.values():
            peak = short_peak(search.problem, choice.layout)
            assert peak.device == pytest.approx(choice.device_bytes), choice.layout
            assert choice.device_bytes <= search.capacity


def test_recompute_modes_are_all_searched() -> None:
    assert RECOMPUTE == ("none", "selective", "full")


def test_405b_on_16384_considers_every_layout() -> None:
    """How fast this is, `benchmarks/planner_speed.py` says."""
    found = make("llama-3.1-405b", 16384, 8192, 2048).run()
    assert found.best and found.considered > 2_000_000


@pytest.mark.parametrize(("model", "devices", "rows"), [("llama-3-8b", 8, 8), ("llama-3-70b", 96, 192)])
def test_no_bound_is_above_a_layout(model: str, devices: int, rows: int) -> None:
    """Mesh shapes, layout groups and splits of the data axis that the search leaves out are slower than the search asks for."""
    search = make(model, devices, 4096, rows, "h100-sxm-80gb")
    for mesh_shape in mesh_shapes(search.problem, devices)[0]:
        for layout_group in list(layout_groups(search.problem, mesh_shape))[::7]:
            bound, blocks = search.bound(layout_group), search.stage_blocks(layout_group)
            for kind in set(kinds_of(layout_group)) & set(ON_DEVICE):
                for split in shardings(mesh_shape.data, mesh_shape.cp, kind):
                    seconds = search.clock.step(variant(layout_group, kind, *split), blocks).total * (1 + 1e-9)
                    assert search.mesh_shape_bound(mesh_shape) <= seconds and bound.seconds <= seconds, (
                        layout_group,
                        kind,
                    )
                    assert split in search._options(bound, kind, seconds), (layout_group, kind, split)

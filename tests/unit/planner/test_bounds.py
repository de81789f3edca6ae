"""The search's bounds against the estimates, on random problems; and three problems that wrong bounds and tables got wrong.

A bound that is above an estimate hides a layout: `search.run` then says that nothing fits, or misses the fastest.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.arch.parameters import counts
from shardwright.arch.shape import generic_shape
from shardwright.planner.hardware import find_device
from shardwright.planner.memory_peak import PeakMemory
from shardwright.planner.memory_timeline import peak
from shardwright.planner.optimizer import block_matrices
from shardwright.planner.problem import Problem
from shardwright.planner.program import own_program
from shardwright.planner.search import FAR, Search
from shardwright.planner.space import KINDS, kinds_of, layout_groups, mesh_shapes, shardings, variant, variants

ROUNDING = 1 + 1e-9
"""Bounds add up in another order than estimates do."""


@st.composite
def searches(draw: Any) -> Search:
    """A small problem of any kind on a few devices."""
    heads = draw(st.sampled_from([2, 4, 6]))
    shape = generic_shape(
        layers=draw(st.integers(1, 9)),
        hidden=heads * draw(st.sampled_from([16, 64, 128])),
        heads=heads,
        kv_heads=draw(st.sampled_from([heads, heads // 2])),
        vocab=draw(st.sampled_from([17, 1000, 50000])),
        gated=draw(st.booleans()),
        tied=draw(st.booleans()),
        biases=draw(st.booleans()),
        learned_positions=draw(st.sampled_from([0, 256])),
    )
    kind: Any = draw(st.sampled_from(["cuda", "cuda", "cpu"]))
    devices = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    device = find_device("cpu" if kind == "cpu" else "h100-sxm-80gb")
    problem = Problem(
        shape,
        max_length=draw(st.sampled_from([16, 64, 240])),
        global_batch_size=devices * draw(st.sampled_from([1, 2, 6, 12])),
        param_dtype=draw(st.sampled_from(["bf16", "fp32"])),
        reduce_dtype=draw(st.sampled_from(["bf16", "fp32"])),
        master_dtype=draw(st.sampled_from(["bf16", "fp32"])),
        optimizer=draw(st.sampled_from(["adamw", "sgd", "muon"])),
        attention=draw(st.sampled_from(["flash", "eager"])),
        loss=draw(st.sampled_from(["full", "chunked", "auto"])),
        packed=draw(st.booleans()),
        device_kind=kind,
        program=replace(own_program(kind, draw(st.booleans())), context_bytes=0.0),
        device=device,
    )
    return Search(problem, devices, KINDS if draw(st.booleans()) else KINDS[:-1])


@settings(max_examples=60, deadline=None)
@given(searches(), st.integers(0, 6))
def test_no_bound_is_above_an_estimate(search: Search, start: int) -> None:
    """Bounds of mesh shape, group and split, in memory and time: every seventh layout group, all families and splits."""
    for mesh_shape in mesh_shapes(search.problem, search.devices)[0]:
        legal = set(layout_groups(search.problem, mesh_shape))
        assert {bound.layout_group for bound in search.bounded(mesh_shape, inf, inf)} <= legal
        for layout_group in list(layout_groups(search.problem, mesh_shape))[start::7]:
            bound, blocks = search.bound(layout_group), search.stage_blocks(layout_group)
            for kind in set(kinds_of(layout_group)) & set(search.kinds):
                floor = search.states(mesh_shape, kind)
                for split in shardings(mesh_shape.data, mesh_shape.cp, kind):
                    layout = variant(layout_group, kind, *split)
                    needed = search.needs(layout)[1] * ROUNDING
                    assert floor.mean <= needed, layout
                    assert floor.first + bound.first_blocks * floor.first_block + bound.kept <= needed, layout
                    seconds = search.clock.step(layout, blocks).total * ROUNDING
                    assert search.mesh_shape_bound(mesh_shape) <= seconds and bound.seconds <= seconds, layout
                    assert split in search._options(bound, kind, seconds), layout


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(searches(), st.floats(0.02, 1.2))
def test_the_search_finds_what_brute_force_finds(search: Search, part: float) -> None:
    """On devices whose memory is a part of what the largest layout needs, so that some layouts fit."""
    timed = []
    for mesh_shape in mesh_shapes(search.problem, search.devices)[0]:
        for layout_group in layout_groups(search.problem, mesh_shape):
            for kind in set(kinds_of(layout_group)) & set(search.kinds):
                family = f"{kind}+{mesh_shape.family}" if mesh_shape.family else kind
                for layout in variants(layout_group, kind):
                    seconds = search.clock.step(layout, search.stage_blocks(layout_group)).total
                    timed.append((family, seconds, search.needs(layout)[1]))
    capacity = part * ROUNDING * max(needed for _, _, needed in timed)
    best: dict[str, float] = {}
    for family, seconds, needed in timed:
        if needed <= capacity:
            best[family] = min(seconds, best.get(family, seconds))
    device = replace(search.problem.known_device, memory_bytes=capacity)
    small = Search(replace(search.problem, device=device), search.devices, search.kinds)
    found = small.run()
    assert set(found.best) == set(best) and not set(found.rejected) & set(best)
    for family, seconds in best.items():
        if seconds <= FAR * min(best.values()):
            choice = found.best[family]
            # Units and prefetch are tried for the best layouts only, and make them faster.
            assert small.clock.step(choice.layout, choice.stage_blocks).total <= seconds * ROUNDING, family


def test_sgd_fits_where_its_states_fit() -> None:
    """1.66 billion parameters in fp32 under SGD: weights, momentum and gradients are 18.6 GiB, which 24 GiB hold."""
    shape = generic_shape(layers=24, hidden=2304, heads=24, vocab=51200, ffn=9216)
    dtypes = {"param_dtype": "fp32", "reduce_dtype": "fp32", "master_dtype": "fp32"}
    problem = Problem(shape, 128, 1, **dtypes, optimizer="sgd", device=find_device("rtx4090-24gb"))  # type: ignore[arg-type]
    assert counts(shape).total == pytest.approx(1.66e9, rel=0.01)  # tolerance: the model is named by three digits
    assert set(Search(problem, 1).run().best) == {"ddp"}
    assert not Search(replace(problem, optimizer="adamw"), 1).run().best


def test_muon_keeps_two_states_of_embedding_and_head_and_one_of_matrices() -> None:
    """As `train/muon.py` does: momentum of a block's matrices, AdamW's two moments of the rest."""
    shape = generic_shape(layers=3, hidden=64, heads=4, vocab=1000, tied=False)
    matrices = 3 * (4 * 64 * 64 + 2 * 4 * 64 * 64)
    assert sum(group.numel * group.count for group in block_matrices(shape)) == matrices
    problem = Problem(shape, 32, 4, optimizer="muon")
    layout_group = next(layout_groups(problem, mesh_shapes(problem, 1)[0][0]))
    layout = next(variants(layout_group, "ddp"))
    states = peak(problem, layout).composition["optimizer states"]
    assert states == 4 * (2 * counts(shape).total - matrices)
    adamw, muon = (PeakMemory(replace(problem, optimizer=name)).peak_bytes(layout)[0] for name in ("adamw", "muon"))
    assert adamw - muon == 4 * matrices


def test_a_muon_step_gathers_and_orthogonalises_every_matrix_on_every_rank() -> None:
    """Sharding divides AdamW's step; of Muon's the products stay, which are five times (4 r r c + 2 r r r) FLOPs a matrix."""
    shape = generic_shape(layers=8, hidden=4096, heads=32, vocab=1000, ffn=16384, tied=False, biases=False)
    seconds = {}
    for name in ("adamw", "muon"):
        for devices in (1, 8):
            problem = Problem(shape, 1024, 8, optimizer=name, device=find_device("h100-sxm-80gb"))
            search = Search(problem, devices)
            mesh_shape = next(s for s in mesh_shapes(problem, devices)[0] if s.data == devices)
            layout_group = next(layout_groups(problem, mesh_shape))
            kind = "zero3" if devices > 1 else "ddp"
            seconds[name, devices] = search.clock.step(next(variants(layout_group, kind)), (8,)).optimizer
    assert seconds["adamw", 8] == pytest.approx(seconds["adamw", 1] / 8)
    square, wide = 4 * 4096**3 + 2 * 4096**3, 4 * 4096**2 * 16384 + 2 * 4096**3
    products = 8 * 5 * (4 * square + 2 * wide)
    assert seconds["muon", 8] > products / 989.4e12  # at the peak of the device
    gathered = 8 * sum(group.numel for group in block_matrices(shape)) * 4 * 7 / 8
    assert seconds["muon", 8] > products / 989.4e12 + gathered / 450e9  # and at its links' data sheet

"""Every diagnosis from made-up numbers, each with a near miss that must not get its name.

Known faults: A01, A03, A06, A07, A11, A13, A28, A29, A34, A36, A37, A42, A47, A52 as `check` would name them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.check_world import (
    COUNTS,
    DATA_RANKS,
    DECAY,
    RATES,
    ROUNDS,
    SHAPES,
    TOTAL,
    Fault,
    Gradients,
    World,
    judge,
)

from shardwright.layout.axes import Axes

Gradient = Callable[[int, World], Gradients]
NEAR = 1.03  # a factor that no fault produces


def scaled(factor: float, only: Callable[[str], bool] = lambda name: True) -> Gradient:
    """The right gradient times `factor` in the parameters that `only` accepts."""
    return lambda update, world: {n: g * (factor if only(n) else 1.0) for n, g in world.gradient(update).items()}


def weighted(weight: Callable[[int], float]) -> Gradient:
    """The sum of the microbatches' gradients with a weight for each."""
    return lambda update, world: {
        n: sum(weight(i) * part[n] for i, part in enumerate(world.parts[update]))  # type: ignore[misc]
        for n in SHAPES
    }


def rank_count(rank: int) -> int:
    return sum(COUNTS[rank::DATA_RANKS])


def norm_of(g: Gradients) -> float:
    return sum(t.square().sum().item() for t in g.values()) ** 0.5


def added_rows(start: Gradients) -> Gradients:
    """A start whose second half of rows (those of shard 1 of 2) is another one."""
    moved = {n: t.clone() for n, t in start.items()}
    for name in ("embed.weight", "blocks.0.w", "head.weight"):
        moved[name][SHAPES[name][0] // 2 :] += 0.1
    return moved


# name of the diagnosis -> (the fault, a near miss of it)
CASES: dict[str, tuple[Fault, Fault]] = {
    "summed_twice": (Fault(gradient=scaled(DATA_RANKS)), Fault(gradient=scaled(DATA_RANKS * NEAR))),
    "averaged": (Fault(gradient=scaled(1 / DATA_RANKS)), Fault(gradient=scaled(NEAR / DATA_RANKS))),
    "divided_again": (Fault(gradient=scaled(1 / ROUNDS)), Fault(gradient=scaled(NEAR / ROUNDS))),
    "accumulated_twice": (Fault(gradient=scaled(ROUNDS)), Fault(gradient=scaled(ROUNDS * NEAR))),
    "never_divided": (Fault(gradient=scaled(TOTAL)), Fault(gradient=scaled(TOTAL + 1))),
    "divided_twice": (Fault(gradient=scaled(1 / TOTAL)), Fault(gradient=scaled(1 / (TOTAL + 1)))),
    "sign": (Fault(gradient=scaled(-1.0)), Fault(gradient=scaled(-NEAR))),
    "scaled": (Fault(gradient=scaled(NEAR)), Fault(gradient=scaled(1 + 1e-11))),
    "clipped_early": (
        Fault(
            gradient=lambda u, w: {
                n: g * min(1.0, 0.05 / (norm_of(w.gradient(u)) + 1e-6)) for n, g in w.gradient(u).items()
            }
        ),
        Fault(gradient=scaled(0.04)),
    ),
    "mean_of_microbatch_means": (
        Fault(gradient=weighted(lambda i: 1 / COUNTS[i] / len(COUNTS))),
        Fault(gradient=weighted(lambda i: 1 / (COUNTS[i] + 1) / len(COUNTS))),
    ),
    "mean_of_rank_means": (
        Fault(gradient=weighted(lambda i: 1 / rank_count(i % DATA_RANKS) / DATA_RANKS)),
        Fault(gradient=weighted(lambda i: (NEAR if i % DATA_RANKS else 1.0) / rank_count(i % DATA_RANKS) / DATA_RANKS)),
    ),
    "last_microbatch_only": (
        Fault(gradient=weighted(lambda i: float(i >= len(COUNTS) - DATA_RANKS) / TOTAL)),
        Fault(gradient=weighted(lambda i: (1.0 if i >= len(COUNTS) - DATA_RANKS else 0.01) / TOTAL)),
    ),
    "first_microbatch_only": (
        Fault(gradient=weighted(lambda i: float(i < DATA_RANKS) / TOTAL)),
        Fault(gradient=weighted(lambda i: (1.0 if i < DATA_RANKS else 0.01) / TOTAL)),
    ),
    "no_reduction": (
        Fault(gradient=weighted(lambda i: float(i % DATA_RANKS == 1) / TOTAL)),
        Fault(gradient=weighted(lambda i: (1.0 if i % DATA_RANKS else 0.01) / TOTAL)),
    ),
    "one_unit": (
        Fault(gradient=scaled(2.0, lambda n: n.startswith("blocks.1"))),
        Fault(gradient=scaled(2.0, lambda n: n.startswith("blocks."))),
    ),
    "no_gradient": (
        Fault(gradient=scaled(0.0, lambda n: n in ("embed.weight", "blocks.0.w"))),
        Fault(gradient=scaled(1e-3, lambda n: n in ("embed.weight", "blocks.0.w"))),
    ),
    "small_parameters": (
        Fault(gradient=scaled(0.0, lambda n: n == "gate")),
        Fault(gradient=scaled(0.0, lambda n: n == "blocks.0.w")),
    ),
    "gradients_not_zeroed": (
        Fault(keep_gradient=True),
        Fault(gradient=lambda u, w: w.gradient(u) if u == 0 else scaled(NEAR)(u, w)),
    ),
    "loss_report": (
        Fault(loss=lambda u, w: sum(w.losses[u]) / TOTAL / DATA_RANKS),
        Fault(loss=lambda u, w: NEAR * sum(w.losses[u]) / TOTAL / DATA_RANKS),
    ),
    "labels_shifted_twice": (Fault(loss=lambda u, w: 1.125), Fault(loss=lambda u, w: 1.126)),
    "labels_not_shifted": (Fault(loss=lambda u, w: 1.75), Fault(loss=lambda u, w: 1.751)),
    "loss_not_reduced": (
        Fault(loss=lambda u, w: sum(w.losses[u][::DATA_RANKS]) / rank_count(0)),
        Fault(loss=lambda u, w: sum(w.losses[u][::DATA_RANKS]) / (rank_count(0) + 1)),
    ),
    "wrong_target_count": (Fault(targets=lambda u: 48), Fault(gradient=scaled(NEAR))),
    "norm_not_reduced": (
        Fault(norm=lambda norm, g: 0.6 * norm, local_norms=(0.6 * norm_of(World.draw().gradient(0)), 0.8)),
        Fault(norm=lambda norm, g: 0.61 * norm, local_norms=(0.6 * norm_of(World.draw().gradient(0)), 0.8)),
    ),
    "norm_counted_twice": (
        Fault(norm=lambda norm, g: norm * 2**0.5),
        Fault(norm=lambda norm, g: norm * 1.45),
    ),
    "norm_after_clipping": (
        Fault(reported_norm=lambda norm, c: norm * c),
        Fault(reported_norm=lambda norm, c: norm * c * NEAR),
    ),
    "norm_is_maximum": (
        Fault(norm=lambda norm, g: max(t.abs().max().item() for t in g.values())),
        Fault(norm=lambda norm, g: NEAR * max(t.abs().max().item() for t in g.values())),
    ),
    "clipping_missing": (Fault(coefficient=lambda c: 1.0), Fault(coefficient=lambda c: 0.9)),
    "clipping_twice": (Fault(coefficient=lambda c: c * c), Fault(coefficient=lambda c: c * c * NEAR)),
    "state_reset": (Fault(reset_state=True), Fault(reset_state=True, coefficient=lambda c: c * NEAR)),
    "decay_in_gradient": (
        Fault(decay_in_gradient=True),
        Fault(decay_in_gradient=True, decay=lambda n: NEAR * DECAY if len(SHAPES[n]) > 1 else 0.0),
    ),
    "schedule_step": (
        Fault(rate=lambda u: RATES[u + 1]),
        Fault(rate=lambda u: RATES[u], moves=lambda n: n != "embed.weight"),
    ),
    "stale_optimizer": (
        Fault(moves=lambda n: False),
        Fault(rate=lambda u: 0.5 * RATES[u], reported_rate=lambda u: RATES[u]),
    ),
    "decay_on_excluded": (
        Fault(decay=lambda n: DECAY),
        Fault(decay=lambda n: DECAY if len(SHAPES[n]) > 1 else NEAR * DECAY),
    ),
    "decay_missing": (
        Fault(decay=lambda n: 0.0),
        Fault(decay=lambda n: 0.5 * DECAY if len(SHAPES[n]) > 1 else 0.0),
    ),
    "step_scaled": (
        Fault(rate=lambda u: 0.77 * RATES[u], reported_rate=lambda u: RATES[u]),
        Fault(rate=lambda u: RATES[1], reported_rate=lambda u: RATES[u]),
    ),
    "same_rows": (
        Fault(rows=lambda i: (0, 1) if i == 1 else (2 * i, 2 * i + 1)),
        Fault(rows=lambda i: (2 * i, 99 + i)),
    ),
    "other_rows": (
        Fault(rows=lambda i: (2 * i, 99 + i)),
        Fault(rows=lambda i: (2 * i, 2 * i + 1) if i else (1, 0)),
    ),
    "different_start": (Fault(start=added_rows), Fault(gradient=scaled(NEAR))),
    "other_parameters": (Fault(rename={"gate": "the_gate"}), Fault(gradient=scaled(NEAR))),
    "diverged_replicas": (Fault(replica_gap=1e-6), Fault(replica_gap=1e-16)),
}


@pytest.mark.parametrize("name", CASES)
def test_fault_gets_its_name_and_a_near_miss_does_not(name: str, tmp_path: Path) -> None:
    """A01 A03 A06 A07 A11 A13 A28 A34 A36 A42 A47 A52: each fault's numbers lead to its diagnosis and to no other."""
    fault, near_miss = CASES[name]
    found = judge(tmp_path / "fault", fault)
    assert found is not None
    assert found.diagnosis.name == name, found
    missed = judge(tmp_path / "near", near_miss)
    assert missed is None or missed.diagnosis.name != name, missed


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("summed_twice", "gradients are 2 times the reference in all 7 tensors; 2 = data ranks"),
        ("divided_again", "1/3 = 1 / microbatches per rank"),
        ("mean_of_microbatch_means", "equal the mean of the means of single microbatches"),
        ("wrong_target_count", "divided by 48 where 30 targets are; that is the number of positions"),
        ("decay_on_excluded", "only 2 of the 2 tensors without weight decay (`blocks.0.norm` ...)"),
        (
            "schedule_step",
            "learning rate 0.0009 where the reference has 0.001; that is the rate of scheduler step 1, this is step 0",
        ),
        ("different_start", "only in the rows of shard 1 of 2"),
        ("norm_not_reduced", "the number is what rank 0 has in its own shard"),
        ("one_unit", "only 2 tensors of `blocks.1` (`blocks.1.w` ...)"),
        ("same_rows", "2 rows are read more than once (row 0) and 2 not at all"),
    ],
)
def test_evidence_has_the_numbers(name: str, words: str, tmp_path: Path) -> None:
    found = judge(tmp_path, CASES[name][0])
    assert found is not None and words in found.diagnosis.evidence, found


def test_the_right_candidate_passes(tmp_path: Path) -> None:
    assert judge(tmp_path, Fault()) is None


def test_all_factors_with_one_value_are_named(tmp_path: Path) -> None:
    """With as many data ranks as microbatches per rank the ratio alone cannot tell: both are said."""
    found = judge(tmp_path, Fault(gradient=scaled(0.5)), axes=Axes(dp_replicate=2, dp_shard=3))
    assert found is not None and found.diagnosis.name == "averaged"
    assert "1/2 = 1 / dp_replicate" in found.diagnosis.evidence


def test_a_factor_of_the_context_parallel_ranks_is_named(tmp_path: Path) -> None:
    """A03: the loss or gradient grows by the cp degree."""
    found = judge(tmp_path, Fault(gradient=scaled(5.0)), axes=Axes(cp=5, dp_shard=2))
    assert found is not None and found.diagnosis.name == "summed_twice", found
    assert "5 = cp" in found.diagnosis.evidence


@pytest.mark.parametrize(("name", "coefficient"), [("clipping_missing", 1.0), ("clipping_twice", None)])
def test_clipping_shows_in_the_step_of_sgd(name: str, coefficient: float | None, tmp_path: Path) -> None:
    """A47: SGD has no moments; the applied update tells whether it was clipped."""
    world = World.draw(optimizer="sgd")
    found = judge(tmp_path, Fault(coefficient=lambda c: coefficient or c * c), world)
    assert found is not None and found.diagnosis.name == name, found


def test_only_a_tied_weight_differs(tmp_path: Path) -> None:
    """A29: one use of a shared weight is missing from its gradient."""
    tied = (("embed.weight", "head.weight"),)

    def one_use(update: int, world: World) -> Gradients:
        g = world.gradient(update)
        noise = torch.arange(40, dtype=torch.float64).reshape(10, 4) / 1000
        return {**g, "embed.weight": g["embed.weight"] - noise}

    found = judge(tmp_path / "tied", Fault(gradient=one_use), tied=tied)
    assert found is not None and found.diagnosis.name == "tying_lost", found
    found = judge(tmp_path / "untied", Fault(gradient=one_use))
    assert found is not None and found.diagnosis.name != "tying_lost", found
    found = judge(tmp_path / "renamed", Fault(rename={"embed.weight": "head.weight", "head.weight": "lm"}), tied=tied)
    assert found is not None and found.diagnosis.name == "tying_lost", found


def test_frozen_parameter_that_moves(tmp_path: Path) -> None:
    """A32: what is frozen stays as it is."""
    fault = Fault(decay=lambda n: DECAY if len(SHAPES[n]) > 1 or n == "blocks.0.norm" else 0.0)
    found = judge(tmp_path / "a", fault, frozen=("blocks.0.norm",))
    assert found is not None and found.diagnosis.name == "frozen_moved", found
    found = judge(tmp_path / "b", fault, frozen=("blocks.1.norm",))
    assert found is not None and found.diagnosis.name == "decay_on_excluded", found


def test_the_first_difference_is_reported_not_its_consequences(tmp_path: Path) -> None:
    """A wrong gradient makes norm, moments and parameters wrong; the finding is the gradient of the first update."""
    found = judge(tmp_path, replace(CASES["averaged"][0]))
    assert found is not None
    assert (found.update, found.kind) == (1, "grad")
    assert found.tensor is not None and found.tensor.name == "embed.weight"

"""`check` of packed and bucketed rows on 2 ranks: layouts pass, and each fault of isolation is found and named.

Known faults: A15, A17, A19, A20.
"""

from __future__ import annotations

import pytest
from tests.gloo.tools.test_fault_injection import judged

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

PLANTS = [
    *(("tiny pack", layout, "") for layout in ("zero3+cp2", "ddp+cp2:ring", "zero2+tp2", "zero1+pp2")),
    ("tiny bucket", "zero3", ""),
    ("tiny bucket", "zero1+cp2", ""),
    ("tiny bucket", "ddp+tp2", "depends_on_width"),
    ("tiny pack", "zero3", "depends_on_neighbours"),
    ("tiny pack weighted", "zero2", ""),
    ("tiny pad weighted", "ddp+tp2", ""),
    ("gpt2-tiny pack", "zero3", "documents_see_each_other"),
    ("gpt2-tiny pack", "zero3+cp2", "documents_see_each_other"),
    ("gpt2-tiny pack", "ddp", "positions_run_on"),
    ("gpt2-tiny pack", "zero3", "target_across_boundary"),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, str], str]:
    return judged(PLANTS, tmp_path_factory.mktemp("documents"))


@pytest.mark.parametrize("plant", PLANTS, ids="-".join)
def test_plant_is_named(plant: tuple[str, str, str], outcomes: dict[tuple[str, str, str], str]) -> None:
    """A15 A17 A19 A20: the engine on packed rows equals documents alone; a learned position table shows running positions."""
    assert outcomes[plant] == plant[2]

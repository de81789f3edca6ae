"""Families of Transformers on one rank against Transformers alone: those that stand for many, see benchmarks/families.py.

The reference is the family's own class with eager attention, each document by itself. All families: docs/families.md.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from benchmarks.families import outcomes
from tests.gloo.ranks import run_ranks

from shardwright.models.build import quiet_transformers

pytestmark = [pytest.mark.gloo, pytest.mark.slow, pytest.mark.timeout(600)]

EQUAL = ("equal", "equal", "equal")
UNPACKED = ("equal", "equal", "refused")
FAMILIES = {
    "llama": EQUAL,
    "mistral": EQUAL,  # windows
    "gemma2": EQUAL,  # capped scores
    "gpt_oss": EQUAL,  # sinks, windows, experts
    "qwen3_moe": EQUAL,
    "deepseek_v3": EQUAL,  # values narrower than keys, experts
    "gpt2": EQUAL,  # learned positions
    "opt": EQUAL,  # the same with an offset
    "bert": EQUAL,  # an encoder as a decoder
    "bloom": UNPACKED,  # ALiBi
    "falcon": UNPACKED,  # attention that cannot be replaced
    "mamba": UNPACKED,  # no attention
}
"""Family -> what becomes of it under pad, bucket and pack."""


def _survey(families: list[str]) -> dict[str, dict[str, tuple[str, str]]]:
    quiet_transformers()
    with tempfile.TemporaryDirectory() as place:
        return {
            family: {b: (o.verdict, o.reason) for b, o in outcomes(family, Path(place) / family)} for family in families
        }


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, tuple[str, str]]]:
    return run_ranks(_survey, 1, list(FAMILIES), timeout=580.0)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_train_as_they_would_alone(family: str, found: dict[str, dict[str, tuple[str, str]]]) -> None:
    """Loss and gradient norm of three documents in one microbatch; or a refusal with a reason."""
    assert tuple(verdict for verdict, _ in found[family].values()) == FAMILIES[family], found[family]
    assert all(reason for verdict, reason in found[family].values() if verdict == "refused")

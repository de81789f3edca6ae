"""FLOPs by hand arithmetic and by published conventions. Known-fault rows: A117, A118, A119."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.places import REFERENCE

from shardwright.arch.flops import (
    UTILISATION,
    document_flops,
    model_flops,
    recompute_flops,
    utilisation,
    visible_keys,
)
from shardwright.arch.known_models import known_shape
from shardwright.arch.parameters import counts
from shardwright.arch.shape import Shape

TINY = Shape("llama", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=256)


def _gpt(matrix: int, attention: float, head: int) -> Callable[[Shape, int], float]:
    """matrix x L h^2 (1 + S / (attention h) + V / (head L h)): Megatron-LM's way to write the FLOPs of a GPT."""

    def flops(s: Shape, length: int) -> float:
        h, layers = s.hidden, s.layers
        return matrix * layers * h**2 * (1 + length / (attention * h) + s.vocab / (head * layers * h))

    return flops


CONVENTIONS = {
    # Narayanan et al. 2021 (arXiv:2104.04473), section 5.1: full recomputation counted
    "narayanan": _gpt(96, 6, 16),
    # Korthikanti et al. 2022 (arXiv:2205.05198), appendix A: model FLOPs, and hardware FLOPs with selective recomputation
    "korthikanti": _gpt(72, 6, 12),
    "korthikanti-selective": _gpt(72, 3, 12),
}
"""FLOPs per token by published conventions."""


def rows(name: str) -> list[dict[str, str]]:
    with (REFERENCE / name).open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_is_a_product_and_the_embedding_a_lookup(tied: bool) -> None:
    """A117: 90 112 matrix weights, 540 672 training FLOPs a token, tied and untied alike."""
    shape = replace(TINY, tied=tied)
    flops = model_flops(shape, 32)
    assert flops.blocks + flops.head == 540_672


def test_attention_counts_query_heads_and_names_its_mask() -> None:
    """A118: 49 152 FLOPs a token in full, 24 576 causal; KV heads do not change them; recomputation is apart."""
    assert model_flops(TINY, 32).attention == 49_152
    assert model_flops(TINY, 32, causal=True).attention == 24_576
    assert model_flops(replace(TINY, kv_heads=4), 32).attention == 49_152
    assert model_flops(TINY, 32).total == 540_672 + 49_152
    assert recompute_flops(TINY, 32, "full") == 2 * 2 * 36_864 + 49_152 / 3
    assert recompute_flops(TINY, 32, "selective") == 49_152 / 3
    assert recompute_flops(TINY, 32, "alternate") == 2 * 2 * 14_336 + 49_152 / 3
    assert "not halved for the causal mask" in UTILISATION


def test_documents_count_their_own_keys() -> None:
    """A118: two documents of 8 and one of 16 in a row of 32: 12 x 2 x 64 = 1 536 FLOPs a token and key, full convention."""
    useful, again = document_flops(TINY, {8: 2, 16: 1}, "selective")
    assert useful == 32 * 540_672 + 1_536 * (2 * 8 * 8 + 16 * 16)
    assert again == 1_536 / 3 * (2 * 8 * 8 + 16 * 16)
    assert document_flops(TINY, {8: 2}, causal=True) == (16 * 540_672 + 1_536 / 2 * 2 * 8 * 8, 0.0)
    assert document_flops(TINY, {}) == (0.0, 0.0)


def test_a_window_counts_only_what_it_shows() -> None:
    """A118: under a window a query sees at most `window` keys; brute force over all queries."""
    length, window = 4096, 512
    seen = sum(min(query + 1, window) for query in range(length)) / length
    # tolerance: the closed form counts the window's edge in the middle of a key
    assert visible_keys(length, window, causal=True) == pytest.approx(seen, rel=0.002)
    assert visible_keys(length, length, causal=True) == visible_keys(length, None, causal=True) == length / 2


def test_mfu_divides_by_the_peak_of_all_devices() -> None:
    """A119: twice the devices at twice the tokens leaves MFU unchanged."""
    once = utilisation(6e9, 1000.0, 1, 312e12)
    assert utilisation(6e9, 2000.0, 2, 312e12) == once == pytest.approx(6e12 / 312e12)


def test_korthikanti_mfu_and_hfu_within_print_rounding() -> None:
    """Table 5 of arXiv:2205.05198: both percentages lie inside what the printed seconds and percents allow."""
    for row in rows("korthikanti2022_iteration.csv"):
        shape = known_shape(f"megatron-{row['model']}")
        tokens = int(row["gbs"]) * int(row["seq"])
        seconds = float(row["iter_sp_selective_s"])
        for percent, name in ((row["mfu_pct"], "korthikanti"), (row["hfu_pct"], "korthikanti-selective")):
            flops = CONVENTIONS[name](shape, int(row["seq"]))
            slow, fast = (
                100 * utilisation(flops, tokens / (seconds + d), int(row["gpus"]), 312e12) for d in (0.005, -0.005)
            )
            assert slow - 0.05 <= float(percent) <= fast + 0.05, (row["model"], name, slow, fast, percent)


def test_narayanan_table_2_days_within_print_rounding() -> None:
    """Days to train on 300 billion tokens from the printed TFLOP/s per GPU and their FLOPs of a token."""
    shapes = {"174.6": "megatron-175b", "529.6": "megatron-530b"}
    for row in rows("narayanan2021_t2.csv"):
        flops = CONVENTIONS["narayanan"](known_shape(shapes[row["params_b"]]), 2048)
        gpus, teraflops = int(row["gpus"]), float(row["tflops_gpu"])
        short, long = (flops * 300e9 / (gpus * (teraflops + d) * 1e12) / 86400 for d in (0.5, -0.5))
        assert short - 0.5 <= float(row["days_300b"]) <= long + 0.5, (row, short, long)


@pytest.mark.parametrize("row", rows("mpt_parameters.csv"), ids=lambda row: f"{row['model']}-{row['length']}")
def test_mpt_parameter_counts(row: dict[str, str]) -> None:
    """The counts that llm-foundry prints, at every sequence length (its position table grows with it)."""
    shape = replace(known_shape(row["model"]), learned_positions=int(row["length"]))
    assert counts(shape).total == int(row["parameters"])

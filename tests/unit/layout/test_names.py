"""Layout names of the command line. Known faults: A123 (a misspelt strategy is refused), A124 (options without effect)."""

from __future__ import annotations

import pytest

from shardwright.config.schema import Parallelism
from shardwright.errors import ConfigError
from shardwright.layout.names import apply_layout, every_layout, expand_layouts, parse_layout


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("ddp", {"data_parallel": "ddp"}),
        ("fsdp2", {"data_parallel": "zero3"}),
        ("hsdp", {"data_parallel": "zero3", "dp_replicate_size": 2}),
        ("hsdp4", {"data_parallel": "zero3", "dp_replicate_size": 4}),
        ("zero1+hsdp2", {"data_parallel": "zero1", "dp_replicate_size": 2}),
        ("tp2", {"tp_size": 2}),
        ("pp2:zero_bubble", {"pp_size": 2, "pp_schedule": "zero_bubble"}),
        ("pp2+zero1+tp4", {"pp_size": 2, "data_parallel": "zero1", "tp_size": 4}),
        ("ddp+cp4:ring", {"data_parallel": "ddp", "cp_size": 4, "cp_attention": "ring"}),
        ("zero3 + cp2", {"data_parallel": "zero3", "cp_size": 2}),
    ],
)
def test_name_sets_these_keys(name: str, keys: dict[str, object]) -> None:
    assert parse_layout(name) == keys


@pytest.mark.parametrize(
    ("name", "part_of_message"),
    [
        ("zero4", "Did you mean `zero"),
        ("no-shard", "Parts are ddp, zero1, zero2, zero3, fsdp2"),
        ("zero3+tpp2", "Did you mean `tp2`?"),
        ("tp", "Did you mean `tp"),
        ("ddp:1f1b", "is no layout"),
        ("pp2:1f2b", "Did you mean `1f1b`?"),
        ("cp2:rings", "Did you mean `ring`?"),
        ("tp2:ring", "is no layout"),
        ("tp1", "splits nothing"),
        ("ddp+zero1", "sets data_parallel twice: ddp and zero1"),
        ("tp2+tp4", "sets tp_size twice: 2 and 4"),
        ("ddp+hsdp2", "asks for replicas of ddp"),
        ("zero3+", "is no layout"),
    ],
)
def test_name_is_refused(name: str, part_of_message: str) -> None:
    """A123: a name that is not known never falls back to a layout."""
    with pytest.raises(ConfigError) as caught:
        parse_layout(name)
    assert part_of_message in str(caught.value)


def test_options_of_the_run_file_stay_only_where_they_have_an_effect() -> None:
    """A124: an option that a layout ignores is not carried into it."""
    base = Parallelism(
        data_parallel="zero3",
        unit="root",
        prefetch=2,
        reshard_after_forward=False,
        tp_size=2,
        sequence_parallel=False,
        cp_load_balance=False,
    )
    assert apply_layout("cp2", base).cp_load_balance is False
    assert apply_layout("ddp", base) == Parallelism(data_parallel="ddp")
    assert apply_layout("zero2", base) == Parallelism(data_parallel="zero2", unit="root", prefetch=2)
    assert apply_layout("hsdp2", base).reshard_after_forward is False
    assert apply_layout("tp2", base).sequence_parallel is False
    assert apply_layout("tp2", base).data_parallel == "zero3"


def test_all_is_every_legal_layout() -> None:
    assert every_layout(1) == ("ddp", "zero1", "zero2", "zero3")
    four = every_layout(4)
    assert four[:6] == ("ddp", "zero1", "zero2", "zero3", "hsdp2", "hsdp4")
    assert {"zero1+tp2", "ddp+cp4:ring", "ddp+pp4:zbv", "zero3+pp2+tp2", "ddp+cp2+tp2"} <= set(four)
    assert len(four) == len(set(four)) == 43
    assert expand_layouts("zero3,all", 2)[:5] == ("zero3", "ddp", "zero1", "zero2", "hsdp2")
    with pytest.raises(ConfigError, match="empty layout name"):
        expand_layouts("ddp,,zero1", 2)

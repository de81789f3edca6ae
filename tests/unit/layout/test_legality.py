"""What is refused before any process starts: sizes, batches, options without effect. Covers A122, A129 and A136."""

# ruff: noqa: E501 (messages stand as they are printed)

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest

from shardwright.config.load import Loaded, load_run_file
from shardwright.errors import ConfigError
from shardwright.layout.axes import Axes, resolve_axes
from shardwright.layout.legality import check_device, check_run, notices
from shardwright.layout.size_rules import accumulation_steps
from shardwright.layout.zero import STAGES

TF32 = {"precision__float32_products": "tf32"}


def run(**options: Any) -> Loaded:
    values = {
        "model.model_name_or_path": "m",
        "data.train": ["a"],
        "training.max_steps": 10,
        "training.global_batch_size": 8,
    }
    values |= {key.replace("__", "."): value for key, value in options.items()}
    return load_run_file(None, {key: value for key, value in values.items() if value is not ...})


@pytest.mark.parametrize(
    ("world", "options", "message"),
    [
        (4, {"parallelism__tp_size": 3}, "tp_size 3 = 3, but the world size is 4"),
        (4, {"parallelism__dp_replicate_size": 3}, "dp_replicate_size 3 = 3, but the world size is 4"),
        (4, {"parallelism__dp_shard_size": 2}, "dp_shard_size 2 = 2, but the world size is 4"),
        (4, {"parallelism__dp_shard_size": 2, "parallelism__pp_size": 1}, "Start 2 processes"),
        (2, {"parallelism__dp_shard_size": 4}, "dp_shard_size 4 = 4, but the world size is 2"),
        (1, {"parallelism__dp_replicate_size": 2}, "dp_replicate_size 2 = 2, but the world size is 1"),
        (2, {"parallelism__data_parallel": "ddp", "parallelism__dp_replicate_size": 3}, "dp_replicate_size 3 = 3"),
        (2, {"parallelism__data_parallel": "ddp", "parallelism__dp_shard_size": 2}, "ddp shards nothing"),
        (3, {}, "training.global_batch_size = 8 is not a multiple of 3 = per_device_train_batch_size 1 x 3 data ranks"),
        (3, {}, "Set training.global_batch_size to 6 or 9"),
        (4, {"training__global_batch_size": 10}, "to 8 or 12"),
        (4, {"training__per_device_train_batch_size": 4}, "Set training.global_batch_size to 16, or training.per_device_train_batch_size to 2"),
        (2, {"training__max_steps": ...}, "The length of the run is not set"),
        (2, {"training__num_train_epochs": 1.0}, "are both set"),
        (2, {"training__warmup_steps": 11}, "training.warmup_steps 11, but the run has 10 updates"),
        (2, {"training__lr_scheduler_type": "constant", "training__warmup_steps": 2}, "has no effect here"),
        (2, {"training__lr_scheduler_type": "constant_with_warmup", "training__lr_scheduler_kwargs": {"a": 1}}, "has no effect here: lr_scheduler_type constant_with_warmup has no arguments"),
        (2, {"training__no_decay": ["*x"]}, "--training.no_decay: `training.no_decay` has no effect here: training.weight_decay is 0. Remove"),
        (2, {"checkpoint__copies": 2}, "has no effect here: checkpoint.storage is shared"),
        (2, {"training__eval_steps": 5}, "has no effect here: data.validation is empty"),
        (2, {"training__per_device_eval_batch_size": 5}, "has no effect here: data.validation is empty"),
        (2, {"training__optimizer": "sgd", "training__adam_beta1": 0.8}, "has no effect here: the optimizer is sgd"),
        (2, {"training__optimizer_kwargs": {"lr": 1}}, "`lr` cannot stand here. The value would silently overwrite another key of the run file, or be overwritten. Set training.learning_rate."),
        (2, {"training__optimizer_kwargs": {"weight_decay": 1}}, "Set training.weight_decay"),
        (2, {"training__optimizer_kwargs": {"betas": [0, 0]}}, "Set training.adam_beta1"),
        (2, {"parallelism__data_parallel": "ddp", "parallelism__unit": "root"}, "ddp keeps whole parameters"),
        (2, {"parallelism__data_parallel": "ddp", "parallelism__prefetch": 1}, "ddp keeps whole parameters"),
        (2, {"parallelism__data_parallel": "zero2", "parallelism__reshard_after_forward": True}, "only zero3 drops"),
        (2, {"parallelism__bucket_bytes": 5}, "only ddp reduces in buckets"),
        (2, {"parallelism__unit": "root", "parallelism__prefetch": 2}, "one unit has no next unit"),
        (2, {"parallelism__sequence_parallel": True}, "tp_size is 1"),
        (2, {"parallelism__pp_schedule": "gpipe"}, "pp_size is 1"),
        (4, {"parallelism__reshard_after_forward": 4}, "neither 1 nor all"),
        (4, {"parallelism__reshard_after_forward": 1}, "neither 1 nor all"),
        (4, {"parallelism__reshard_after_forward": 3}, "a divisor of the ranks that share them"),
        (2, {"model__kwargs": {"a": 1}}, "the model is a Hugging Face directory"),
        (2, {"model__model_name_or_path": "a:b", "model__config_overrides": {"a": 1}}, "a function of a package"),
        (2, {"precision__param_dtype": "fp64"}, "precision.param_dtype fp64 is wider than precision.master_dtype fp32"),
        (2, {"precision__reduce_dtype": "fp64"}, "precision.reduce_dtype fp64 is wider"),
        (2, {"precision__master_dtype": "fp64"}, "needs param_dtype fp64"),
        (2, {"memory__cpu_offload": "params", "parallelism__data_parallel": "ddp"}, "ddp keeps whole parameters"),
        (2, {"memory__cpu_offload": "params", "hardware__device": "cpu"}, "This run is on the CPU"),
        (2, {"hardware__numa_binding": False, "hardware__device": "cpu"}, "numa_binding false has no effect on the CPU"),
        (2, {**TF32, "hardware__device": "cpu"}, "float32_products tf32 has no effect on the CPU"),
        (2, {**TF32, "precision__param_dtype": "bf16"}, "compute is not in fp32"),
    ],
)  # fmt: skip
def test_what_is_refused(world: int, options: dict[str, Any], message: str) -> None:
    """A122: a global batch is never rounded. A136: the product of the sizes is the world size, or the run is refused."""
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_run(run(**options), world)


@pytest.mark.parametrize(
    ("world", "options", "axes"),
    [
        (1, {}, Axes()),
        (4, {}, Axes(dp_shard=4)),
        (4, {"parallelism__data_parallel": "ddp"}, Axes(dp_replicate=4)),
        (4, {"parallelism__data_parallel": "ddp", "parallelism__dp_replicate_size": 4}, Axes(dp_replicate=4)),
        (4, {"parallelism__dp_replicate_size": 2}, Axes(dp_replicate=2, dp_shard=2)),
        (2, {"parallelism__dp_replicate_size": 2, "parallelism__dp_shard_size": 1}, Axes(dp_replicate=2)),
        (4, {"parallelism__reshard_after_forward": 2}, Axes(dp_shard=4)),
        (4, {"parallelism__reshard_after_forward": False}, Axes(dp_shard=4)),
    ],
)
def test_what_is_allowed(world: int, options: dict[str, Any], axes: Axes) -> None:
    assert check_run(run(**options), world) == axes


def test_axes_that_the_planner_knows_too() -> None:
    p = run(parallelism__tp_size=2, parallelism__pp_size=2, parallelism__cp_size=2).run.parallelism
    assert resolve_axes(p, 16) == Axes(pp=2, dp_shard=2, cp=2, tp=2)
    with pytest.raises(ConfigError, match="pp_size 2 x cp_size 2 x tp_size 2 = 8, but the world size is 12"):
        resolve_axes(p, 12)


def test_ranks_and_coordinates_are_inverse() -> None:
    axes = Axes(pp=2, dp_replicate=3, dp_shard=2, cp=2, tp=2)
    order = list(product(range(2), range(3), range(2), range(2), range(2)))
    for rank, place in enumerate(order):  # the innermost axis varies fastest
        found = axes.coordinates(rank)
        assert tuple(found.values()) == place
        assert axes.rank(**found) == rank
        assert axes.data_rank(rank) == place[1] * 2 + place[2]
    for wrong in (-1, 48):
        with pytest.raises(ValueError):
            axes.coordinates(wrong)


@pytest.mark.parametrize("total", range(1, 25))
def test_rows_of_an_update_are_the_same_for_every_layout(total: int) -> None:
    """A122: microbatch x accumulation x data ranks is the global batch, or the run is refused."""
    for rows, ranks in product(range(1, 9), range(1, 9)):
        if total % (rows * ranks):
            with pytest.raises(ConfigError, match="is not a multiple of"):
                accumulation_steps(total, rows, ranks)
        else:
            assert accumulation_steps(total, rows, ranks) * rows * ranks == total


def test_offloading_needs_a_gpu_and_narrow_weights_are_said() -> None:
    """A129: bf16 weights are allowed, with a line that says what is lost."""
    offload = run(memory__cpu_offload="params").run
    with pytest.raises(ConfigError, match="This run is on the CPU"):
        check_device(offload, "cpu")
    check_device(offload, "cuda")
    check_device(run().run, "cpu")
    bf16 = {f"precision__{name}_dtype": "bf16" for name in ("param", "reduce", "master")}
    assert "rounded away" in notices(run(**bf16).run)[0]
    assert notices(run(precision__param_dtype="bf16").run) == []


def test_traffic_of_the_stages() -> None:
    """Rajbhandari et al. 2019, section 7: 2, 2 and 3 times the parameters; with 4 microbatches by hand."""
    assert [STAGES[kind].units_sent() for kind in ("ddp", "zero1", "zero2", "zero3")] == [2, 2, 2, 3]
    assert [STAGES[kind].units_sent(4) for kind in ("ddp", "zero1", "zero2", "zero3")] == [2, 2, 5, 12]

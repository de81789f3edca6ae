"""What a run file may ask for, checked before any process starts.

Every verb that starts ranks calls `check_run` first: sizes, divisibility, and options that would have no effect.
"""

from __future__ import annotations

from typing import NamedTuple

from shardwright.config.load import Loaded, keys, sections
from shardwright.config.rates import check_length
from shardwright.config.schema import Parallelism, RunFile
from shardwright.dtypes import DTYPES
from shardwright.errors import ConfigError, did_you_mean
from shardwright.layout.axes import AXES, Axes, resolve_axes
from shardwright.layout.combinations import check_combination
from shardwright.layout.import_path import is_import_path
from shardwright.layout.size_rules import SIZE_RULES, accumulation_steps


class Rule(NamedTuple):
    """`keys` have no effect in a run where `idle` is true, for `reason`."""

    idle: bool
    reason: str
    keys: tuple[str, ...]


def layout_rules(p: Parallelism) -> list[Rule]:
    """The rules of keys of section `parallelism`."""
    sharded, kind = p.data_parallel != "ddp", p.data_parallel
    reshard = ("parallelism.reshard_after_forward",)
    return [
        Rule(not sharded, "ddp keeps whole parameters on every rank", ("parallelism.unit", "parallelism.prefetch")),
        Rule(kind != "zero3", "only zero3 drops gathered parameters after forward", reshard),
        Rule(sharded, "only ddp reduces in buckets", ("parallelism.bucket_bytes",)),
        *(
            Rule(getattr(p, axis.key) == 1, f"{axis.key} is 1", tuple(f"parallelism.{key}" for key in axis.options))
            for axis in AXES.values()
            if axis.options
        ),
    ]


def effect_rules(run: RunFile) -> list[Rule]:
    """The rules of every key that has no effect in some runs; a key that stands in none always has one.

    Keys of `data` that only some formats read have theirs where the formats are known (`data/formats.py`).
    """
    t, c, data = run.training, run.checkpoint, run.data
    module, schedule = is_import_path(run.model.model_name_or_path), t.lr_scheduler_type
    adam = ("training.adam_beta1", "training.adam_beta2", "training.adam_epsilon")
    evaluation = ("training.eval_steps", "training.until_eval_loss", "training.per_device_eval_batch_size")
    alone = data.streaming and not data.validation
    packed = data.batching == "pack" and run.model.attn_implementation == "eager"
    without_arguments = schedule in ("constant", "constant_with_warmup")
    unit = run.parallelism.unit
    return [
        *layout_rules(run.parallelism),
        Rule(unit == "root", "one unit has no next unit to gather ahead", ("parallelism.prefetch",)),
        Rule(t.optimizer != "adamw", f"the optimizer is {t.optimizer}", adam),
        Rule(schedule == "constant", "lr_scheduler_type constant has no warm-up", ("training.warmup_steps",)),
        Rule(without_arguments, f"lr_scheduler_type {schedule} has no arguments", ("training.lr_scheduler_kwargs",)),
        Rule(t.weight_decay == 0, "training.weight_decay is 0", ("training.no_decay",)),
        Rule(not data.validation, "data.validation is empty", evaluation),
        Rule(t.eval_steps is None, "nothing is evaluated before the end", ("training.until_eval_loss",)),
        Rule(c.save_total_limit is None, "every checkpoint is kept", ("checkpoint.keep_every",)),
        Rule(c.storage == "shared", "checkpoint.storage is shared", ("checkpoint.copies",)),
        Rule(not c.async_save, "checkpoint.async_save is false", ("checkpoint.async_when_busy",)),
        Rule(c.resume == "never", "checkpoint.resume is never", ("checkpoint.partial", "checkpoint.accept_changes")),
        Rule(module, "the model is a function of a package", ("model.config_overrides", "model.attn_implementation")),
        Rule(data.batching != "pack", f"data.batching is {data.batching}", ("data.packing_strategy",)),
        Rule(data.batching != "bucket", f"data.batching is {data.batching}", ("data.bucket_updates",)),
        Rule(not data.streaming, "data.streaming is false", ("data.stream_window",)),
        Rule(alone, "a stream is tokenised while it is read, by one process", ("data.num_proc",)),
        Rule(t.max_steps is not None, "every update of a run of max_steps is full", ("data.drop_last",)),
        Rule(not module, "the model is a Hugging Face directory", ("model.kwargs",)),
        Rule(packed, "packed rows have a core attention that keeps documents apart", ("model.attn_implementation",)),
        Rule(c.save_steps is None, "only the last update is saved", ("checkpoint.keep_every",)),
        Rule(run.precision.param_dtype != "fp32", "compute is not in fp32", ("precision.float32_products",)),
        Rule((t.max_steps or 3) < 3, "the third update is the first that is profiled", ("logging.profile_steps",)),
    ]


def idle_keys(loaded: Loaded) -> dict[str, str]:
    """{key: reason} of every key that was set to something else than its default, and has no effect in this run.

    A default that is written out asks for nothing: the resolved file of a run, which holds every key, can be run again.
    """
    settings = loaded.settings()
    defaults = {
        f"{name}.{key}": field.default for name, part in sections().items() for key, field in part.model_fields.items()
    }
    given = {key for key, origin in loaded.origin.items() if origin != "default" and settings[key] != defaults[key]}
    return {key: rule.reason for rule in effect_rules(loaded.run) if rule.idle for key in rule.keys if key in given}


_HOMES = {"lr": "training.learning_rate", "params": "", "weight_decay": "training.weight_decay", "wrap": ""}
"""Arguments of optimizers that the run file sets elsewhere."""


def _check_training(run: RunFile) -> None:
    t = run.training
    adam = {"betas": "training.adam_beta1", "eps": "training.adam_epsilon"} if t.optimizer == "adamw" else {}
    for key, home in {**_HOMES, **adam}.items():
        if key in t.optimizer_kwargs:
            raise ConfigError(
                f"training.optimizer_kwargs: `{key}` cannot stand here.",
                "The value would silently overwrite another key of the run file, or be overwritten.",
                f"Set {home}." if home else f"Remove `{key}`.",
            )
    if (t.max_steps is None) == (t.num_train_epochs is None):
        both = t.max_steps is not None
        raise ConfigError(
            "training.max_steps and training.num_train_epochs are both set."
            if both
            else "The length of the run is not set.",
            "Exactly one of training.max_steps and training.num_train_epochs says how many updates there are.",
            "Remove one." if both else "Set one.",
        )
    if t.lr_scheduler_type == "constant" and t.warmup_steps:
        raise ConfigError("training.warmup_steps with lr_scheduler_type constant.", "", "Use constant_with_warmup.")
    if t.max_steps is not None:
        check_length(t, t.max_steps)


def _check_stream(run: RunFile) -> None:
    if not run.data.streaming:
        return
    if run.training.num_train_epochs is not None:
        raise ConfigError(
            "training.num_train_epochs with data.streaming.",
            "The length of a stream is not known before it has been read.",
            "Set training.max_steps; a stream that ends is read again.",
        )
    if run.data.bucket_updates > 1:
        raise ConfigError(
            "data.bucket_updates with data.streaming.",
            "Which updates share a window of the stream depends on where documents end in it.",
            "Remove data.bucket_updates; the rows of each update are still sorted by length.",
        )


def _check_precision(run: RunFile) -> None:
    p = run.precision
    if DTYPES[p.param_dtype].eps < DTYPES[p.master_dtype].eps:
        raise ConfigError(
            f"precision.param_dtype {p.param_dtype} is wider than precision.master_dtype {p.master_dtype}.",
            "Compute cannot be more exact than the stored weights.",
            f"Set precision.master_dtype to {p.param_dtype}.",
        )
    if DTYPES[p.reduce_dtype].eps < DTYPES[p.master_dtype].eps:
        raise ConfigError(
            f"precision.reduce_dtype {p.reduce_dtype} is wider than precision.master_dtype {p.master_dtype}.",
            "Gradients are kept in the master dtype, so the wider sum would be rounded again.",
            f"Set precision.reduce_dtype to {p.master_dtype}.",
        )
    if p.param_dtype != "fp64" and p.master_dtype == "fp64":
        raise ConfigError(
            "precision.master_dtype fp64 needs param_dtype fp64.",
            "float64 is for proofs: all three dtypes go together.",
        )


def _check_checkpoint(run: RunFile) -> None:
    c, every = run.checkpoint, run.training.eval_steps
    if c.keep_best and (not every or not c.save_steps or c.save_steps % every):
        raise ConfigError(
            f"checkpoint.keep_best with checkpoint.save_steps {c.save_steps} and training.eval_steps {every}.",
            "Only a checkpoint of an update that was evaluated can be the best.",
            "Set eval_steps, and save_steps to a multiple of eval_steps.",
        )
    if unknown := [key for key in c.accept_changes if key not in keys()]:
        raise ConfigError(
            f"checkpoint.accept_changes: `{unknown[0]}` is not a key of the run file.",
            "",
            did_you_mean(unknown[0], keys()),
        )


def check_device(run: RunFile, kind: str) -> None:
    """Raises `ConfigError` for what this run cannot do on a device of `kind` (`cpu` or `cuda`)."""
    if run.memory.cpu_offload != "none" and kind == "cpu":
        raise ConfigError(
            "memory.cpu_offload params moves shards between a GPU and its host.",
            "This run is on the CPU: the shards are there already.",
            "Set memory.cpu_offload to none.",
        )
    idle = {"precision.float32_products tf32": run.precision.float32_products == "tf32"}
    idle["hardware.numa_binding false"] = not run.hardware.numa_binding
    for key in (key for key, is_set in idle.items() if is_set and kind == "cpu"):
        name = key.split()[0]
        raise ConfigError(f"{key} has no effect on the CPU.", "This setting is for GPUs.", f"Remove {name}.")


def notices(run: RunFile) -> list[str]:
    """What is allowed but should be known, one line each."""
    lines, c, updates = [], run.checkpoint, run.training.max_steps
    if run.precision.master_dtype == "bf16":
        lines.append(
            "precision.master_dtype bf16: weights and optimizer states have 8 significant bits, so a step smaller than "
            "1/512 of a weight is rounded away. fp32 keeps it."
        )
    if c.async_save and c.save_steps is None:
        lines.append(
            "checkpoint.async_save has no effect: only the last update is saved, and no training goes on beside that save. "
            "Set checkpoint.save_steps."
        )
    steps = {
        "training.eval_steps": (run.training.eval_steps, "evaluates"),
        "checkpoint.save_steps": (c.save_steps, "saves"),
        "logging.profile_steps": (run.logging.profile_steps, "profiles"),
    }
    for key, (every, does) in steps.items():
        if updates and every and every > updates:
            once = "only the third update" if does == "profiles" else "only the last update"
            lines.append(f"{key} {every} is more than training.max_steps {updates}: the run {does} {once}.")
    return lines


def check_settings(loaded: Loaded) -> None:
    """Raises `ConfigError` for what no number of ranks can mend: an option without effect, or one that contradicts another."""
    run = loaded.run
    for key, reason in idle_keys(loaded).items():
        raise ConfigError(f"{loaded.origin[key]}: `{key}` has no effect here: {reason}.", "", f"Remove `{key}`.")
    _check_training(run)
    _check_stream(run)
    _check_precision(run)
    _check_checkpoint(run)
    if run.hardware.device != "auto":
        check_device(run, run.hardware.device)


def check_run(loaded: Loaded, world_size: int) -> Axes:
    """The axes of this run on `world_size` ranks.

    Raises `ConfigError` for sizes that do not multiply to the world size, a global batch that does not divide, an
    option without effect, or a combination that this version cannot run.
    """
    run = loaded.run
    check_settings(loaded)
    axes = resolve_axes(run.parallelism, world_size)
    check_combination(run, axes)
    for axis, check in SIZE_RULES.items():
        if getattr(axes, axis) > 1:
            check(run, axes)
    shards, whole = run.parallelism.reshard_after_forward, axes.shard_ranks
    if isinstance(shards, int) and not isinstance(shards, bool) and (whole % shards or shards in (1, whole)):
        raise ConfigError(
            f"parallelism.reshard_after_forward {shards} on dp_shard_size x cp_size = {whole}.",
            "Parameters are kept on that many ranks after forward: a divisor of the ranks that share them, neither 1 nor all.",
            "Use true or false, or a proper divisor.",
        )
    accumulation_steps(run.training.global_batch_size, run.training.per_device_train_batch_size, axes.data_ranks)
    return axes

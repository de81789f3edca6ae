"""The run file as strict pydantic models. Names are Hugging Face's where Hugging Face has one.

Sections: model, data, training (the objective) and parallelism, precision, memory, checkpoint, hardware, logging
(how it is carried out). Nothing here imports torch, so that `plan`, `schema` and `--help` stay fast.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]

Dtype = Literal["fp64", "fp32", "bf16"]
DataParallel = Literal["ddp", "zero1", "zero2", "zero3"]
ContextAttention = Literal["all_gather", "ring"]
Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv"]


class Section(BaseModel):
    """A section of the run file: unknown keys are refused, values are immutable once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=(), allow_inf_nan=False)


class Model(Section):
    """Which model is trained and how its first weights come about."""

    model_name_or_path: str = Field(
        description="Hugging Face directory (config.json, perhaps safetensors) or package.module:function"
    )
    init: Literal["pretrained", "random"] = Field(
        "pretrained", description="pretrained: read safetensors. random: from (seed, parameter name) only"
    )
    config_overrides: dict[str, Any] = Field(
        {}, description="Keys of config.json to replace, for example num_hidden_layers"
    )
    kwargs: dict[str, Any] = Field({}, description="Arguments of package.module:function")
    attn_implementation: Literal["sdpa", "eager"] = "sdpa"
    tokenizer_name_or_path: str | None = Field(None, description="Default: the model's directory")
    freeze: list[str] = Field([], description="Patterns of parameter names that are not trained (fnmatch)")


class Source(Section):
    """One entry of data.train or data.validation with more than a path."""

    path: str
    weight: PositiveFloat = Field(1.0, description="Passes over its rows per epoch; data.train only")
    split: str | None = Field(None, description="Of a saved DatasetDict; default: train or validation")


def _entry_kind(value: object) -> str:
    return "source" if isinstance(value, dict | Source) else "path"


Entry = Annotated[Annotated[str, Tag("path")] | Annotated[Source, Tag("source")], Discriminator(_entry_kind)]
Format = Literal["auto", "text", "messages", "prompt_completion", "tokens", "alpaca", "sharegpt"]


class Data(Section):
    """What is read, and how it becomes rows of `max_length` tokens."""

    train: list[Entry] = Field(
        min_length=1,
        description="Files, globs or directories (JSONL, text, parquet, save_to_disk), or {path, weight, split}",
    )
    validation: list[Entry] = []
    format: Format = Field("auto", description="auto: by the columns of each file")
    text_column: str = Field("text", description="The column of format text")
    chat_template: str | None = Field(None, description="File with a Jinja template in place of the tokenizer's own")
    assistant_only_loss: bool | None = Field(
        None, description="Messages: train only what the assistant writes; default true"
    )
    completion_only_loss: bool | None = Field(
        None, description="Prompt and completion: train only the completion; default true"
    )
    max_length: Positive = 1024
    overlong: Literal["split", "truncate", "error"] | None = Field(
        None,
        description="A document of more than max_length tokens: cut into rows (default for text and tokens), cut "
        "off (default for all else), or refused",
    )
    append_eos: bool = Field(True, description="End token after text and completions; chat templates end turns")
    batching: Literal["pad", "bucket", "pack"] = Field(
        "pad",
        description="pad: a document to a row of max_length. bucket: a document to a row, microbatches as wide as their "
        "longest. pack: documents share rows",
    )
    packing_strategy: Literal["bfd", "wrapped"] = Field(
        "bfd",
        description="pack only. bfd: whole documents (no_split), by best fit decreasing. wrapped: one after the other, cut "
        "where a row is full (split)",
    )
    bucket_updates: Positive = Field(
        1,
        description="bucket only: the rows of so many updates, at most half an epoch, are sorted by length together. "
        "1: updates hold the rows of pad",
    )
    streaming: bool = Field(
        False,
        description="Read data.train while training, from files or package.module:function (an IterableDataset): for data "
        "that is not there as a whole, or too large to tokenise first",
    )
    stream_window: Positive = Field(
        10_000, description="streaming only: documents that are shuffled and packed together"
    )
    shuffle: bool = True
    drop_last: bool = Field(
        False, description="With num_train_epochs: leave out a last update that would be part-filled"
    )
    num_proc: Positive | None = Field(None, description="Tokenising processes; default: all cores")
    cache_dir: str | None = Field(None, description="Tokenised data; default: `.cache` beside output_dir")


class Training(Section):
    """The objective: what is minimised, over which rows, by which steps. No layout may change it."""

    max_steps: Positive | None = Field(None, description="Updates; give this or num_train_epochs")
    num_train_epochs: PositiveFloat | None = None
    global_batch_size: Positive = Field(description="Rows per update, over all ranks and microbatches")
    per_device_train_batch_size: Positive = Field(
        1, description="Rows per microbatch: memory and speed, not the objective"
    )
    per_device_eval_batch_size: Positive | None = Field(None, description="Default: per_device_train_batch_size")
    loss: str = Field(
        "cross_entropy",
        description="cross_entropy, or package.module:function(logits, labels, weights) -> (loss_sum, target_count)",
    )
    learning_rate: PositiveFloat = 3e-4
    optimizer: str = Field("adamw", description="adamw, sgd, muon or package.module:Class")
    optimizer_kwargs: dict[str, Any] = {}
    weight_decay: NonNegativeFloat = 0.0
    no_decay: list[str] = Field(
        ["*bias", "*norm*", "*ln_*"],
        description="Patterns of names that weight decay skips; vectors and scalars are always skipped",
    )
    adam_beta1: Probability = 0.9
    adam_beta2: Probability = 0.999
    adam_epsilon: PositiveFloat = 1e-8
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: dict[str, Any] = {}
    warmup_steps: NonNegative = Field(
        0,
        description="Updates of warm-up, fewer than the run has; the first update has a learning rate of 0",
    )
    max_grad_norm: PositiveFloat | None = Field(
        1.0, description="Gradient norm limit over all parameters; null: no clipping"
    )
    seed: NonNegative = 42
    eval_steps: Positive | None = Field(
        None, description="Evaluate every so many updates, and at the end; needs data.validation"
    )
    until_eval_loss: PositiveFloat | None = Field(
        None, description="Stop once eval/loss is this or less; needs eval_steps"
    )
    on_non_finite: Literal["stop", "skip"] = Field(
        "stop",
        description="A loss or gradient that is not finite: stop all ranks, or skip the update on all ranks",
    )
    on_spike: Literal["continue", "warn", "stop"] = Field(
        "warn",
        description="A loss 10 robust deviations above, or a gradient norm 20 times, the median of the last 64 updates",
    )


class Parallelism(Section):
    """The layout: sizes of the mesh axes (pp, dp_replicate, dp_shard, cp, tp) and the data-parallel kind."""

    data_parallel: DataParallel = Field("zero3", description="fsdp2 is another name of zero3")
    dp_replicate_size: Positive = Field(
        1, description="> 1 with zero*: hybrid sharding (HSDP). With ddp: all the data ranks"
    )
    dp_shard_size: int = Field(-1, description="zero* only. -1: the ranks that the other axes leave")
    tp_size: Positive = 1
    sequence_parallel: bool | None = Field(
        None, description="With tp_size > 1: shard norms and residuals too; default true"
    )
    tp_plan: dict[str, str] = Field(
        {},
        description="With tp_size > 1: {pattern of module names: style}, in place of the model's own plan",
    )
    cp_size: Positive = 1
    cp_attention: ContextAttention | None = Field(
        None, description="With cp_size > 1: gather keys and values (default all_gather), or pass them round"
    )
    cp_load_balance: bool | None = Field(
        None,
        description="With cp_size > 1: each rank holds a chunk of the row's head and one of its tail; default true",
    )
    pp_size: Positive = 1
    pp_schedule: Schedule | None = Field(None, description="With pp_size > 1; default 1f1b")
    unit: Literal["block", "root"] | Positive = Field(
        "block", description="What is gathered together: a block, all, or N blocks"
    )
    reshard_after_forward: bool | Positive | None = Field(
        None,
        description="zero3 only: drop gathered parameters after forward (default true), or keep them on N ranks",
    )
    prefetch: NonNegative | None = Field(
        None, description="zero* only: units gathered ahead; default 2 on the CPU, 1 else"
    )
    bucket_bytes: Positive | None = Field(None, description="ddp only: gradient bucket; default 25 MiB, 4 on CPUs")

    @field_validator("data_parallel", mode="before")
    @classmethod
    def _alias(cls, value: object) -> object:
        return "zero3" if value == "fsdp2" else value

    @field_validator("dp_shard_size")
    @classmethod
    def _shard_size(cls, value: int) -> int:
        if value != -1 and value < 1:
            raise ValueError("-1 (the rest) or at least 1")
        return value


class Precision(Section):
    """Numbers: the dtype of compute, of gradient reduction, and of the stored (master) weights."""

    param_dtype: Dtype = Field("fp32", description="Forward and backward")
    reduce_dtype: Dtype = Field("fp32", description="Gradients between ranks")
    master_dtype: Dtype = Field("fp32", description="Stored weights and optimizer states")


class Memory(Section):
    """What is traded for memory."""

    activation_checkpointing: Literal["none", "full", "selective"] = Field(
        "none", description="full: recompute each block. selective: keep matrix products, recompute the rest"
    )
    cpu_offload: Literal["none", "params"] = Field(
        "none", description="Shards and optimizer on the host (zero* on a GPU only)"
    )
    compile: bool = Field(False, description="torch.compile each block")
    loss_chunk_tokens: Literal["auto"] | NonNegative = Field(
        "auto",
        description="Make logits and their loss for so many targets at a time; 0: whole. auto: where they are large",
    )


class Checkpoint(Section):
    """Where the run writes, and what it keeps."""

    output_dir: str = "runs/run"
    storage: Literal["shared", "per_host"] = Field(
        "shared",
        description="per_host: output_dir is each host's own disk, and each writes what its ranks hold",
    )
    copies: NonNegative = Field(
        1, description="With storage per_host: how many other hosts hold a copy of what a host writes"
    )
    save_steps: Positive | None = Field(None, description="Default: only at the end and when stopped")
    save_total_limit: Positive | None = Field(None, description="Newest checkpoints kept; default: all")
    keep_every: Positive | None = Field(
        None, description="With save_total_limit: those of every so many updates are kept too"
    )
    keep_best: bool = Field(
        False, description="Keep the one with the lowest eval/loss, and point the link `best` to it"
    )
    on_save_error: Literal["stop", "warn"] = Field(
        "stop", description="A checkpoint that cannot be written: stop all ranks, or say so and go on"
    )
    async_save: bool = Field(
        False, description="Write while training goes on; takes a copy of each rank's state in host memory"
    )
    async_when_busy: Literal["wait", "skip"] = Field(
        "wait", description="With async_save, when the one before is still being written"
    )
    resume: Literal["auto", "never"] | str = Field(
        "auto",
        description="auto: the newest good checkpoint of the branch chosen last; or a directory, which begins a branch",
    )
    partial: list[str] = Field(
        [],
        description="Patterns of names that the checkpoint may lack, have too much, or have in another shape",
    )
    accept_changes: list[str] = Field(
        [],
        description="Keys of the objective that may differ from the checkpoint's; the count of rows done is kept, and the "
        "optimizer state that both have",
    )
    export_hf: Literal["none", "final"] = Field("final", description="Write a Hugging Face directory at the end")


class Hardware(Section):
    """Where it runs."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads_per_rank: Positive | None = Field(
        None,
        description="CPU threads of a rank; default: its cores, divided by the ranks on this machine that share them",
    )
    timeout_seconds: Positive = Field(
        600, description="A collective, or a phase of a rank without progress, that takes longer ends the run"
    )
    grace_seconds: Positive = Field(
        30, description="How long ranks may take to save after a request to stop; they are then killed"
    )


class Logging(Section):
    """What is printed and recorded. metrics.jsonl is always written."""

    log_steps: Positive = 1
    profile_steps: Positive | None = Field(
        None,
        description="Profile the third update, and then one in so many: comm/exposed_seconds; in the update after it, in "
        "the first evaluation and the first save, what tensors take by phase: mem/*_peak_bytes; costs these some time",
    )
    report_to: list[Literal["tensorboard", "trackio"]] = []


class RunFile(Section):
    """A whole run file."""

    model: Model
    data: Data
    training: Training
    parallelism: Parallelism = Parallelism()
    precision: Precision = Precision()
    memory: Memory = Memory()
    checkpoint: Checkpoint = Checkpoint()
    hardware: Hardware = Hardware()
    logging: Logging = Logging()

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
    """Which model is trained, and where its first weights come from."""

    model_name_or_path: str = Field(
        description="Directory with config.json (and safetensors), or package.module:function that builds an nn.Module"
    )
    init: Literal["pretrained", "random"] = Field(
        "pretrained",
        description="First weights. pretrained: from the safetensors of the directory. random: drawn from the seed and each "
        "parameter's name",
    )
    config_overrides: dict[str, Any] = Field(
        {}, description="Values that replace those of config.json, for example {num_hidden_layers: 4}"
    )
    kwargs: dict[str, Any] = Field({}, description="Keyword arguments of package.module:function")
    attn_implementation: Literal["sdpa", "eager"] = Field(
        "sdpa", description="Core attention. sdpa: torch's fused kernels. eager: plain matrix products"
    )
    tokenizer_name_or_path: str | None = Field(
        None, description="Directory of the tokenizer; default: the model's directory"
    )
    freeze: list[str] = Field(
        [], description="Parameters that are not trained: patterns of their names (fnmatch), for example *embed*"
    )


class Source(Section):
    """One entry of data.train or data.validation with more than a path."""

    path: str = Field(description="File, glob, directory or package.module:function, as in data.train")
    weight: PositiveFloat = Field(1.0, description="How often an epoch uses each row of this source; data.train only")
    split: str | None = Field(None, description="Split of a saved DatasetDict; default: train or validation")


def _entry_kind(value: object) -> str:
    return "source" if isinstance(value, dict | Source) else "path"


Entry = Annotated[Annotated[str, Tag("path")] | Annotated[Source, Tag("source")], Discriminator(_entry_kind)]
Format = Literal["auto", "text", "messages", "prompt_completion", "tokens", "alpaca", "sharegpt"]


class Data(Section):
    """What is read, and how it becomes rows of `max_length` tokens."""

    train: list[Entry] = Field(
        min_length=1,
        description="Training data: files, globs or directories (JSONL, text, parquet, save_to_disk), or {path, weight, split}",
    )
    validation: list[Entry] = Field([], description="Data for evaluation, named as in data.train")
    format: Format = Field("auto", description="What a record holds; auto: told by the columns of each file")
    text_column: str = Field("text", description="Column that holds the text, for format text")
    chat_template: str | None = Field(
        None, description="File with a Jinja chat template, used instead of the tokenizer's own"
    )
    assistant_only_loss: bool | None = Field(
        None, description="For chats: train only on what the assistant writes; default true"
    )
    completion_only_loss: bool | None = Field(
        None, description="For prompts with completions: train only on the completion; default true"
    )
    max_length: Positive = Field(1024, description="Tokens per row")
    overlong: Literal["split", "truncate", "error"] | None = Field(
        None,
        description="A document of more than max_length tokens. split: cut into several rows (default for text and tokens). "
        "truncate: its end is dropped (default for all else). error: refused",
    )
    append_eos: bool = Field(
        True, description="Put the end token behind each text and completion; chat templates end turns themselves"
    )
    batching: Literal["pad", "bucket", "pack"] = Field(
        "pad",
        description="pad: one document per row of max_length. bucket: one document per row, each microbatch as wide as its "
        "longest row. pack: several documents per row, which attention keeps apart",
    )
    packing_strategy: Literal["bfd", "wrapped"] = Field(
        "bfd",
        description="With batching pack. bfd: whole documents, best fit decreasing (no_split). wrapped: documents one after "
        "the other, cut where a row is full (split)",
    )
    bucket_updates: Positive = Field(
        1,
        description="With batching bucket: number of updates (at most half an epoch) whose rows are sorted by length "
        "together. 1: each update holds the same rows as with pad",
    )
    streaming: bool = Field(
        False,
        description="Read and tokenise data.train while training, from files or from package.module:function that returns "
        "an IterableDataset. For data that does not exist as a whole, or is too large to tokenise first",
    )
    stream_window: Positive = Field(
        10_000, description="With streaming: number of documents that are shuffled and packed together"
    )
    shuffle: bool = Field(
        True, description="New order of rows in each epoch, from training.seed; false: order of the data"
    )
    drop_last: bool = Field(False, description="With num_train_epochs: leave out a last update that has too few rows")
    num_proc: Positive | None = Field(None, description="Number of processes that tokenise; default: all cores")
    cache_dir: str | None = Field(None, description="Directory for tokenised data; default: `.cache` beside output_dir")


class Training(Section):
    """The objective: what is minimised, over which rows, by which steps. No layout may change it."""

    max_steps: Positive | None = Field(None, description="Length of the run in updates; set this or num_train_epochs")
    num_train_epochs: PositiveFloat | None = Field(
        None, description="Length of the run in passes over the data; set this or max_steps"
    )
    global_batch_size: Positive = Field(description="Rows per update, over all ranks and microbatches")
    per_device_train_batch_size: Positive = Field(
        1, description="Rows per microbatch; changes memory and speed, not the objective"
    )
    per_device_eval_batch_size: Positive | None = Field(
        None, description="Rows per microbatch of evaluation; default: per_device_train_batch_size"
    )
    loss: str = Field(
        "cross_entropy",
        description="cross_entropy, or package.module:function, called with (logits, labels, weights), that returns "
        "(loss_sum, target_count)",
    )
    learning_rate: PositiveFloat = Field(3e-4, description="Learning rate after warm-up")
    optimizer: str = Field("adamw", description="adamw, sgd, muon or package.module:Class")
    optimizer_kwargs: dict[str, Any] = Field(
        {}, description="Further arguments of the optimizer, for example {momentum: 0.9}"
    )
    weight_decay: NonNegativeFloat = Field(0.0, description="Decoupled weight decay where the optimizer has it (adamw)")
    no_decay: list[str] = Field(
        ["*bias", "*norm*", "*ln_*"],
        description="Patterns of parameter names without weight decay; vectors and scalars never have any",
    )
    adam_beta1: Probability = Field(0.9, description="adamw: decay of the mean of gradients")
    adam_beta2: Probability = Field(0.999, description="adamw: decay of the mean of squared gradients")
    adam_epsilon: PositiveFloat = Field(1e-8, description="adamw: added to the root of the mean of squares")
    lr_scheduler_type: str = Field(
        "linear", description="Schedule of the learning rate, by its name in transformers.get_scheduler"
    )
    lr_scheduler_kwargs: dict[str, Any] = Field({}, description="Arguments of the schedule")
    warmup_steps: NonNegative = Field(
        0, description="Updates over which the learning rate rises from 0, fewer than the run has"
    )
    max_grad_norm: PositiveFloat | None = Field(
        1.0, description="Largest gradient norm over all parameters, larger ones are clipped; null: no clipping"
    )
    seed: NonNegative = Field(42, description="Seed of first weights, row order and dropout")
    eval_steps: Positive | None = Field(
        None, description="Updates between evaluations; needs data.validation. Default: only at the end"
    )
    until_eval_loss: PositiveFloat | None = Field(
        None, description="Stop once eval/loss is at most this; needs eval_steps"
    )
    on_non_finite: Literal["stop", "skip"] = Field(
        "stop", description="A loss or gradient that is not finite: stop the run, or skip the update, on all ranks"
    )
    on_spike: Literal["continue", "warn", "stop"] = Field(
        "warn",
        description="What follows a loss 10 robust standard deviations above the median of the last 64 updates, or a gradient "
        "norm 20 times their median",
    )


class Parallelism(Section):
    """The layout: sizes of the mesh axes (pp, dp_replicate, dp_shard, cp, tp) and the data-parallel kind."""

    data_parallel: DataParallel = Field(
        "zero3",
        description="ddp: DistributedDataParallel. With fully_shard: zero1 shards optimizer states, zero2 gradients too, zero3 "
        "(= fsdp2) parameters too",
    )
    dp_replicate_size: Positive = Field(
        1,
        description="With zero*: number of replicas, above 1 for hybrid sharding (HSDP). With ddp: the data-parallel ranks",
    )
    dp_shard_size: int = Field(
        -1, description="With zero*: ranks that share one copy of the state. -1: all that the other axes leave"
    )
    tp_size: Positive = Field(1, description="Tensor-parallel ranks, which divide each layer")
    sequence_parallel: bool | None = Field(
        None,
        description="With tp_size > 1: divide rows over the same ranks between layers (norms, residuals); default true",
    )
    tp_plan: dict[str, str] = Field(
        {}, description="With tp_size > 1: {pattern of module names: style}, instead of the model's own plan"
    )
    cp_size: Positive = Field(1, description="Context-parallel ranks, which divide each row")
    cp_attention: ContextAttention | None = Field(
        None,
        description="With cp_size > 1. all_gather (default): each rank gathers all keys and values. ring: ranks pass keys and "
        "values on",
    )
    cp_load_balance: bool | None = Field(
        None,
        description="With cp_size > 1: each rank holds a chunk of a row's head and a chunk of its tail, so that "
        "causal attention is equal work; default true",
    )
    pp_size: Positive = Field(1, description="Pipeline ranks, which divide the layers")
    pp_schedule: Schedule | None = Field(None, description="Pipeline schedule, with pp_size > 1; default 1f1b")
    unit: Literal["block", "root"] | Positive = Field(
        "block",
        description="With zero*: parameters that are gathered together: of a block, of all the model, or of N blocks",
    )
    reshard_after_forward: bool | Positive | None = Field(
        None,
        description="With zero3: drop gathered parameters after forward (default true), or keep them sharded over N ranks",
    )
    prefetch: NonNegative | None = Field(
        None, description="With zero*: units gathered ahead of their use; default 2 on CPUs, 1 on GPUs"
    )
    bucket_bytes: Positive | None = Field(
        None, description="With ddp: bytes of a gradient bucket; default 25 MiB on GPUs, 4 MiB on CPUs"
    )

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
    """Dtypes of compute, of gradient reduction, and of the stored (master) weights."""

    param_dtype: Dtype = Field("fp32", description="Dtype of forward and backward")
    reduce_dtype: Dtype = Field("fp32", description="Dtype in which ranks sum gradients")
    master_dtype: Dtype = Field("fp32", description="Dtype of stored weights and optimizer states")


class Memory(Section):
    """What saves memory, for time."""

    activation_checkpointing: Literal["none", "full", "selective"] = Field(
        "none",
        description="What backward recomputes. full: each block. selective: all but the matrix products of a block",
    )
    cpu_offload: Literal["none", "params"] = Field(
        "none", description="params: shards and optimizer states stay in host memory; with zero* on GPUs"
    )
    compile: bool = Field(False, description="Compile each block with torch.compile")
    loss_chunk_tokens: Literal["auto"] | NonNegative = Field(
        "auto",
        description="Targets whose logits and loss are computed at a time. 0: all of a microbatch. auto: chosen where logits "
        "are large",
    )


class Checkpoint(Section):
    """Where the run writes, and which checkpoints it keeps."""

    output_dir: str = Field("runs/run", description="Directory of checkpoints, metrics.jsonl and logs")
    storage: Literal["shared", "per_host"] = Field(
        "shared",
        description="shared: all hosts see the same output_dir. per_host: it is a disk of each host, which holds what "
        "its ranks hold",
    )
    copies: NonNegative = Field(
        1, description="With storage per_host: number of other hosts that keep a copy of what a host writes"
    )
    save_steps: Positive | None = Field(
        None, description="Updates between checkpoints; default: only at the end and when stopped"
    )
    save_total_limit: Positive | None = Field(
        None, description="Number of newest checkpoints that are kept; default: all"
    )
    keep_every: Positive | None = Field(
        None, description="With save_total_limit: also keep checkpoints of updates that this number divides"
    )
    keep_best: bool = Field(
        False, description="Keep the checkpoint with the lowest eval/loss, and link `best` to that checkpoint"
    )
    on_save_error: Literal["stop", "warn"] = Field(
        "stop", description="A checkpoint that cannot be written: stop the run, or print a warning and go on"
    )
    async_save: bool = Field(
        False, description="Write while training goes on, from a copy of each rank's state in host memory"
    )
    async_when_busy: Literal["wait", "skip"] = Field(
        "wait", description="With async_save: a save that is due while the last is still written waits, or is skipped"
    )
    resume: Literal["auto", "never"] | str = Field(
        "auto",
        description="auto: the newest intact checkpoint of the branch chosen last. never: start anew. Or the directory of a "
        "checkpoint, which begins a new branch",
    )
    partial: list[str] = Field(
        [],
        description="Patterns of parameter names that the checkpoint need not hold, may hold in excess, or in another shape",
    )
    accept_changes: list[str] = Field(
        [],
        description="Keys of the objective that may differ from those of the checkpoint. The number of rows done is kept, and "
        "the optimizer states that both have",
    )
    export_hf: Literal["none", "final"] = Field("final", description="final: write a Hugging Face directory at the end")


class Hardware(Section):
    """Where the run computes, and its time limits."""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where each rank has a GPU, else cpu")
    threads_per_rank: Positive | None = Field(
        None,
        description="CPU threads of a rank; default: the cores it may use, divided among the ranks that share them",
    )
    timeout_seconds: Positive = Field(
        600, description="Seconds after which a collective, or a rank without progress, ends the run"
    )
    grace_seconds: Positive = Field(
        30, description="Seconds that ranks have to save after a request to stop, before they are killed"
    )


class Logging(Section):
    """What is printed and recorded. metrics.jsonl is always written."""

    log_steps: Positive = Field(1, description="Updates between entries of metrics.jsonl")
    profile_steps: Positive | None = Field(
        None,
        description="Updates between profiles, from the third update on. A profiled update gives comm/exposed_seconds. The "
        "update after that, the first evaluation and the first save give memory by phase, mem/*_peak_bytes. All of these take "
        "longer",
    )
    report_to: list[Literal["tensorboard", "trackio"]] = Field([], description="Where metrics are written too")


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

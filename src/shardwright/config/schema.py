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
    """The model, and its initial weights."""

    model_name_or_path: str = Field(
        description="Directory with config.json (and safetensors), or package.module:function that builds an nn.Module"
    )
    init: Literal["pretrained", "random"] = Field(
        "pretrained",
        description="Initial weights. pretrained: read from the safetensors of the directory. random: drawn from "
        "training.seed and each parameter's name",
    )
    config_overrides: dict[str, Any] = Field(
        {}, description="Values that replace those of config.json, for example {num_hidden_layers: 4}"
    )
    kwargs: dict[str, Any] = Field({}, description="Keyword arguments of package.module:function")
    attn_implementation: Literal["sdpa", "eager"] = Field(
        "sdpa",
        description="Implementation of the core attention. sdpa: torch's fused kernels. eager: plain matrix products",
    )
    tokenizer_name_or_path: str | None = Field(
        None, description="Directory of the tokenizer; default: the model's directory"
    )
    freeze: list[str] = Field(
        [], description="Patterns (fnmatch) of names of parameters that are not trained, for example *embed*"
    )


class Source(Section):
    """An entry of data.train or data.validation that sets more than a path."""

    path: str = Field(description="File, glob, directory or package.module:function, as in data.train")
    weight: PositiveFloat = Field(1.0, description="Passes over this source in an epoch; in data.train only")
    split: str | None = Field(None, description="Split of a saved DatasetDict; default: train or validation")


def _entry_kind(value: object) -> str:
    return "source" if isinstance(value, dict | Source) else "path"


DataEntry = Annotated[Annotated[str, Tag("path")] | Annotated[Source, Tag("source")], Discriminator(_entry_kind)]
Format = Literal["auto", "text", "messages", "prompt_completion", "tokens", "alpaca", "sharegpt"]


class Data(Section):
    """The data, and how records become rows of `max_length` tokens."""

    train: list[DataEntry] = Field(
        min_length=1,
        description="Training data: files, globs or directories (JSONL, text, parquet, save_to_disk), or {path, weight, split}",
    )
    validation: list[DataEntry] = Field([], description="Data for evaluation, named as in data.train")
    format: Format = Field("auto", description="Format of the records; auto: found from the columns of each file")
    text_column: str = Field("text", description="With format text: the column that holds the text")
    chat_template: str | None = Field(
        None, description="File with a Jinja chat template that replaces the tokenizer's own"
    )
    assistant_only_loss: bool | None = Field(
        None, description="For chats: train only on the messages of the assistant; default true"
    )
    completion_only_loss: bool | None = Field(
        None, description="For prompts with completions: train only on the completion; default true"
    )
    max_length: Positive = Field(1024, description="Maximum number of tokens in a row")
    overlong: Literal["split", "truncate", "error"] | None = Field(
        None,
        description="What happens to a document of more than max_length tokens. split: the document is cut into several rows "
        "(default for text and tokens). truncate: its end is dropped (default for other formats). error: the data "
        "is refused",
    )
    append_eos: bool = Field(
        True,
        description="Append the end-of-sequence token to each text and completion; chat templates end turns themselves",
    )
    batching: Literal["pad", "bucket", "pack"] = Field(
        "pad",
        description="pad: one document per row, padded to max_length. bucket: one document per row, padded to the longest row "
        "of the microbatch. pack: several documents per row, which do not attend to each other",
    )
    packing_strategy: Literal["bfd", "wrapped"] = Field(
        "bfd",
        description="With batching pack. bfd: whole documents, best fit decreasing (no_split). wrapped: documents one after "
        "the other, cut where a row is full (split)",
    )
    bucket_updates: Positive = Field(
        1,
        description="With batching bucket: number of updates (at most half an epoch) whose rows are sorted by length "
        "together. 1: each update has the same rows as with pad",
    )
    streaming: bool = Field(
        False,
        description="Read and tokenise data.train during training, from files or from package.module:function that returns an "
        "IterableDataset. For data that is generated, or too large to tokenise before training",
    )
    stream_window: Positive = Field(
        10_000, description="With streaming: number of documents that are shuffled and packed together"
    )
    shuffle: bool = Field(
        True, description="Shuffle the rows anew in each epoch, by training.seed; false: keep the order of the data"
    )
    drop_last: bool = Field(
        False, description="With num_train_epochs: drop the last update if it has fewer than global_batch_size rows"
    )
    num_proc: Positive | None = Field(None, description="Number of processes that tokenise; default: one per core")
    cache_dir: str | None = Field(None, description="Directory for tokenised data; default: `.cache` beside output_dir")


class Training(Section):
    """The objective: loss, rows, optimizer and schedule. The layout never changes the objective."""

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
        description="cross_entropy, or package.module:function. The function is called with (logits, labels, weights) and "
        "returns (loss_sum, target_count)",
    )
    learning_rate: PositiveFloat = Field(3e-4, description="Learning rate after warm-up")
    optimizer: str = Field("adamw", description="adamw, sgd, muon or package.module:Class")
    optimizer_kwargs: dict[str, Any] = Field(
        {}, description="More arguments of the optimizer, for example {momentum: 0.9}"
    )
    weight_decay: NonNegativeFloat = Field(0.0, description="Decoupled weight decay where the optimizer has it (adamw)")
    no_decay: list[str] = Field(
        ["*bias", "*norm*", "*ln_*"],
        description="Patterns of names of parameters without weight decay; vectors and scalars never have weight decay",
    )
    adam_beta1: Probability = Field(0.9, description="adamw: decay rate of the mean of gradients")
    adam_beta2: Probability = Field(0.999, description="adamw: decay rate of the mean of squared gradients")
    adam_epsilon: PositiveFloat = Field(
        1e-8, description="adamw: number added to the root of the mean of squared gradients"
    )
    lr_scheduler_type: str = Field(
        "linear", description="Learning rate schedule, by its name in transformers.get_scheduler"
    )
    lr_scheduler_kwargs: dict[str, Any] = Field({}, description="Arguments of the learning rate schedule")
    warmup_steps: NonNegative = Field(
        0,
        description="Number of updates during which the learning rate rises from 0; must be less than the updates of the run",
    )
    max_grad_norm: PositiveFloat | None = Field(
        1.0, description="Gradients are clipped to this norm over all parameters; null: no clipping"
    )
    seed: NonNegative = Field(42, description="Seed of initial weights, row order and dropout")
    eval_steps: Positive | None = Field(
        None, description="Number of updates between evaluations; needs data.validation. Default: only at the end"
    )
    until_eval_loss: PositiveFloat | None = Field(
        None, description="Stop when eval/loss is at most this value; needs eval_steps"
    )
    on_non_finite: Literal["stop", "skip"] = Field(
        "stop", description="If the loss or a gradient is not finite: stop the run, or skip the update on all ranks"
    )
    on_spike: Literal["continue", "warn", "stop"] = Field(
        "warn",
        description="What happens after a spike: the run continues, prints a warning, or stops. A spike is a loss 10 robust "
        "standard deviations above the median of the last 64 updates, or a gradient norm of 20 times their median",
    )


class Parallelism(Section):
    """The layout: sizes of the mesh axes (pp, dp_replicate, dp_shard, cp, tp) and the kind of data parallelism."""

    data_parallel: DataParallel = Field(
        "zero3",
        description="ddp: each rank holds the whole state, and gradients are all-reduced. With torch's fully_shard, zero1 "
        "shards optimizer states, zero2 also gradients, zero3 (= fsdp2) also parameters",
    )
    dp_replicate_size: Positive = Field(
        1,
        description="With zero*: number of replicas of the sharded state; above 1 for hybrid sharding (HSDP). With ddp: "
        "number of data-parallel ranks",
    )
    dp_shard_size: int = Field(
        -1,
        description="With zero*: number of ranks that share one copy of the state. -1: all ranks that the other axes leave",
    )
    tp_size: Positive = Field(1, description="Number of tensor-parallel ranks, which divide the matrices of each layer")
    sequence_parallel: bool | None = Field(
        None,
        description="With tp_size > 1: divide rows over the tensor-parallel ranks between layers (norms, residuals); default "
        "true",
    )
    tp_plan: dict[str, str] = Field(
        {}, description="With tp_size > 1: {pattern of module names: style}, in place of the model's own plan"
    )
    cp_size: Positive = Field(1, description="Number of context-parallel ranks, which divide each row")
    cp_attention: ContextAttention | None = Field(
        None,
        description="With cp_size > 1. all_gather (default): each rank gathers all keys and values. ring: each rank sends "
        "keys and values to the next rank",
    )
    cp_load_balance: bool | None = Field(
        None,
        description="With cp_size > 1: each rank holds a chunk from the start of a row and a chunk from its end, so that "
        "causal attention is equal work on all ranks; default true",
    )
    pp_size: Positive = Field(1, description="Number of pipeline ranks, which divide the blocks")
    pp_schedule: Schedule | None = Field(None, description="With pp_size > 1: the pipeline schedule; default 1f1b")
    unit: Literal["block", "root"] | Positive = Field(
        "block",
        description="With zero*: parameters that are gathered together. block: those of one block. root: those of the whole "
        "model. N: those of N blocks",
    )
    reshard_after_forward: bool | Positive | None = Field(
        None,
        description="With zero3: true (default) frees gathered parameters after forward, false keeps the parameters until "
        "backward, N keeps the parameters sharded over N ranks",
    )
    prefetch: NonNegative | None = Field(
        None, description="With zero*: number of units gathered ahead of their use; default 2 on CPUs, 1 on GPUs"
    )
    bucket_bytes: Positive | None = Field(
        None, description="With ddp: size of a gradient bucket in bytes; default 25 MiB on GPUs, 4 MiB on CPUs"
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
    float32_products: Literal["exact", "tf32"] = Field(
        "exact",
        description="Products of float32 matrices on GPUs. exact: in float32. tf32: factors are rounded to 11 significant bits "
        "(TensorFloat-32), at 7 to 8 times the rate by the data sheets of A100 and H100",
    )


class Memory(Section):
    """Options that save memory and cost time."""

    activation_checkpointing: Literal["none", "full", "selective", "alternate"] = Field(
        "none",
        description="What backward recomputes. none: nothing. full: each block. selective: each block except its matrix "
        "products, its attention, and its sums over tensor-parallel ranks. alternate: as selective, and every second matrix "
        "product too",
    )
    cpu_offload: Literal["none", "params"] = Field(
        "none", description="params: keep shards and optimizer states in host memory; needs zero* and GPUs"
    )
    compile: bool = Field(False, description="Compile each block with torch.compile")
    loss_chunk_tokens: Literal["auto"] | NonNegative = Field(
        "auto",
        description="Number of targets whose logits and loss are computed at one time. 0: all targets of a microbatch. auto: "
        "chunks only where the logits are large",
    )


class Checkpoint(Section):
    """Where the run writes, and which checkpoints it keeps."""

    output_dir: str = Field("runs/run", description="Directory of checkpoints, metrics.jsonl and logs")
    storage: Literal["shared", "per_host"] = Field(
        "shared",
        description="shared: one output_dir that all hosts see. per_host: an output_dir on each host's own disk, which holds "
        "the state of the ranks of that host",
    )
    copies: NonNegative = Field(
        1, description="With storage per_host: number of other hosts that keep a copy of each host's files"
    )
    save_steps: Positive | None = Field(
        None, description="Number of updates between checkpoints; default: only at the end and when stopped"
    )
    save_total_limit: Positive | None = Field(None, description="Number of newest checkpoints to keep; default: all")
    keep_every: Positive | None = Field(
        None, description="With save_total_limit: also keep the checkpoint of every N-th update"
    )
    keep_best: bool = Field(
        False, description="Keep the checkpoint with the lowest eval/loss, and link `best` to that checkpoint"
    )
    on_save_error: Literal["stop", "warn"] = Field(
        "stop", description="If a checkpoint cannot be written: stop the run, or print a warning and continue"
    )
    async_save: bool = Field(
        False, description="Write checkpoints while training continues, from a copy of each rank's state in host memory"
    )
    async_when_busy: Literal["wait", "skip"] = Field(
        "wait",
        description="With async_save: what a save does while the previous save is still being written. wait: wait for the "
        "previous save. skip: write no checkpoint this time",
    )
    resume: Literal["auto", "never"] | str = Field(
        "auto",
        description="auto: resume from the newest intact checkpoint of the branch chosen last. never: start from the "
        "beginning. A directory: resume from that checkpoint, on a new branch",
    )
    partial: list[str] = Field(
        [],
        description="Patterns of names of parameters that may be missing, additional or of another shape in the checkpoint",
    )
    accept_changes: list[str] = Field(
        [],
        description="Keys of the objective whose values may differ from those of the checkpoint. The run keeps the number of "
        "rows done, and the optimizer states that the old and the new optimizer share",
    )
    export_hf: Literal["none", "final"] = Field(
        "final",
        description="final: write a Hugging Face directory at the end of the run. none: write no such directory",
    )


class Hardware(Section):
    """The device, and the time limits of the run."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: cuda if each rank has a GPU, otherwise cpu"
    )
    threads_per_rank: Positive | None = Field(
        None,
        description="CPU threads of a rank; default: the available cores, divided among the ranks that share them",
    )
    numa_binding: bool = Field(
        True,
        description="On GPUs: each rank runs on the CPU cores of the NUMA node of its GPU, where the system names it",
    )
    garbage_collection_steps: Positive | None = Field(
        50,
        description="Number of updates between runs of Python's garbage collector, which all ranks run after the same updates. "
        "null: Python decides in each rank",
    )
    timeout_seconds: Positive = Field(
        600,
        description="The run ends when a collective, or a rank without progress, takes longer than this number of seconds",
    )
    grace_seconds: Positive = Field(
        30, description="Seconds in which ranks can save after a request to stop, before they are killed"
    )


class Logging(Section):
    """Metrics and profiles. metrics.jsonl is always written."""

    log_steps: Positive = Field(1, description="Number of updates between entries of metrics.jsonl")
    profile_steps: Positive | None = Field(
        None,
        description="Number of updates between profiles, starting at the third update. A profiled update records "
        "comm/exposed_seconds. The update after it, the first evaluation and the first save record memory by "
        "phase (mem/*_peak_bytes). Profiled updates take longer",
    )
    report_to: list[Literal["tensorboard", "trackio"]] = Field(
        [], description="Other trackers that also receive the metrics"
    )


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

"""What is planned: the problem, which no layout may change, and a layout, one way to solve it; from a run file or flags."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from shardwright.arch.model_shape import Inventory, built_by, shape_of_model
from shardwright.backends.facts import backend_facts
from shardwright.layout.axes import Axes
from shardwright.layout.loss import CROSS_ENTROPY
from shardwright.layout.pipeline_schedules import chunks_of
from shardwright.layout.zero import STAGES
from shardwright.planner.device import Device, DeviceKind
from shardwright.planner.program import EAGER, Program, own_program

if TYPE_CHECKING:
    from shardwright.arch.shape import Shape
    from shardwright.config.schema import DataParallel, RunFile, Schedule

Recompute = Literal["none", "selective", "alternate", "full"]
SELECTIVE: tuple[Recompute, ...] = ("selective", "alternate")
"""Kinds of recomputation that keep more of a block than its input."""
Attention = Literal["flash", "eager"]
Loss = Literal["full", "chunked", "auto"]


@dataclass(frozen=True)
class Problem:
    """The objective and its numbers, the program and the device: the same for every layout that is compared."""

    shape: Shape
    max_length: int  # tokens of a row
    global_batch_size: int  # rows of an update
    param_dtype: str = "bf16"  # of compute
    reduce_dtype: str = "fp32"  # of gradients while they are reduced
    master_dtype: str = "fp32"  # of stored weights and optimizer states; ddp keeps casts to the compute dtype beside
    optimizer: str = (
        "adamw"  # a key of `planner/optimizer.py`; an optimizer of the user counts as adamw, and the answer says so
    )
    attention: Attention = "flash"  # flash: no tokens x tokens matrix is kept
    loss: Loss = "full"  # chunked: logits of a part of the targets at a time; auto: as `layout/loss.py` decides
    packed: bool = False  # several documents stand in a row
    document_length: float | None = None  # their mean length, weighted by tokens; None: not known
    device_kind: DeviceKind = "cuda"  # decides how large a chunk of the loss is, and who exchanges gradients
    program: Program = EAGER
    device: Device | None = None  # None: no time can be predicted

    @property
    def attended(self) -> float:
        """Tokens that attention works over: of a row, or of a document in it."""
        return min(self.document_length or self.max_length, self.max_length)

    @property
    def known_device(self) -> Device:
        """The device, for predictions of time. Raises `ValueError` where the problem has none."""
        if self.device is None:
            raise ValueError("a time was asked for, but the problem names no device")
        return self.device


@dataclass(frozen=True)
class Layout:
    """One way to split the problem over the ranks, and its memory choices."""

    axes: Axes = field(default_factory=Axes)
    data_parallel: DataParallel = "zero3"
    microbatch_rows: int = 1
    schedule: Schedule | None = None
    chunks: int = 1  # pipeline stages of a rank; more than 1 for interleaved_1f1b and zbv
    sequence_parallel: bool = True
    recompute: Recompute = "none"
    reshard_after_forward: bool | int = True  # of the blocks; an integer keeps shards on so many ranks
    prefetch: int = 1  # units that are gathered ahead
    unit: Literal["block", "root"] | int = "block"  # what is gathered together: a block, everything, or so many blocks
    offload: Literal["none", "params"] = "none"
    cp_attention: Literal["all_gather", "ring"] = "all_gather"

    def microbatches(self, problem: Problem) -> int:
        """Microbatches of each data rank in one update; the caller has checked that it divides."""
        return problem.global_batch_size // (self.microbatch_rows * self.axes.data_ranks)


def shape_of_run(run: RunFile, inventory: Inventory | None) -> Shape:
    """The shape of the run's model. Raises `ConfigError` where it cannot be known; inventory: see `shape_of_model`."""
    return shape_of_model(run.model.model_name_or_path, inventory, built_by(run.model.model_dump()))


def kind_of(run: RunFile, type_: str | None) -> DeviceKind:
    """The kind of device: of torch's type where the run is, else what the run file asks for; `auto` is planned as CUDA."""
    return "cpu" if (type_ or run.hardware.device) == "cpu" else "cuda"


def problem_of(run: RunFile, shape: Shape, type_: str | None = None, device: Device | None = None) -> Problem:
    """What the run trains. type_: see `kind_of`; without it `device` decides, where one is given."""
    t, precision, chunk = run.training, run.precision, run.memory.loss_chunk_tokens
    loss: Loss = "auto" if chunk == "auto" else "chunked"
    kind = kind_of(run, type_ or (device.kind if device else None))
    return Problem(
        shape,
        run.data.max_length,
        t.global_batch_size,
        precision.param_dtype,
        precision.reduce_dtype,
        precision.master_dtype,
        t.optimizer,
        "eager" if run.model.attn_implementation == "eager" else "flash",
        "full" if t.loss != CROSS_ENTROPY or chunk == 0 else loss,
        run.data.batching == "pack",
        device_kind=kind,
        program=own_program(kind, run.memory.compile),
        device=device,
    )


def problem_of_flags(
    shape: Shape, device: Device, run: RunFile | None, compiled: bool, given: dict[str, Any]
) -> Problem:
    """The problem of `plan`: flags replace what the run file says. given: fields of `Problem`, None where not given."""
    if run is not None:
        problem = problem_of(run, shape, device=device)
        compiled = compiled or run.memory.compile
    else:
        problem = Problem(shape, 0, 0, loss="auto", device_kind=device.kind, device=device)
    given = {key: value for key, value in given.items() if value is not None}
    packed = problem.packed or "document_length" in given
    return replace(problem, **given, packed=packed, program=own_program(device.kind, compiled))


def layout_of(run: RunFile, axes: Axes, type_: str | None = None) -> Layout:
    """How the run is split over ranks; `axes` from `check_run`. type_: see `kind_of`."""
    p, schedule = run.parallelism, None
    if axes.pp > 1:
        schedule = p.pp_schedule or "1f1b"
    reshard = STAGES[p.data_parallel].reshard_after_forward
    return Layout(
        axes,
        p.data_parallel,
        run.training.per_device_train_batch_size,
        schedule,
        1 if schedule is None else chunks_of(schedule),
        p.sequence_parallel is not False,
        run.memory.activation_checkpointing,
        reshard if p.reshard_after_forward is None else p.reshard_after_forward,
        backend_facts(kind_of(run, type_)).prefetch if p.prefetch is None else p.prefetch,
        p.unit,
        run.memory.cpu_offload,
        p.cp_attention or "all_gather",
    )

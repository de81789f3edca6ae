"""What is planned: the job, which no layout may change, and one layout, which is a way of carrying it out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from shardwright.layout.axes import Axes
from shardwright.planner.device import DeviceKind

if TYPE_CHECKING:
    from shardwright.arch.shape import Shape
    from shardwright.config.schema import DataParallel, Schedule

Recompute = Literal["none", "selective", "full"]
Attention = Literal["flash", "eager"]
Loss = Literal["full", "chunked", "auto"]


@dataclass(frozen=True)
class Job:
    """The objective and its numbers: the same for every layout that is compared.

    max_length: tokens per row. global_batch_size: rows per update. The dtypes are those of the run file's
    `precision`: compute, gradient reduction, and stored weights with optimizer states (a bf16 compute dtype
    with an fp32 master keeps the master copy as the only stored weights with zero*, and both copies with
    ddp). attention `flash`: no tokens x tokens matrix is kept. loss `chunked`: logits of a part of the targets
    at a time; `auto`: as `layout/loss.py` decides for a run of our own, else whole. packed: several documents stand in a
    row; document_length: their mean length, each weighted by its tokens, None where it is not known. device_kind: decides
    how large a chunk of the loss is, and who exchanges gradients (gloo on the CPU).
    """

    shape: Shape
    max_length: int
    global_batch_size: int
    param_dtype: str = "bf16"
    reduce_dtype: str = "fp32"
    master_dtype: str = "fp32"
    optimizer: str = "adamw"
    attention: Attention = "flash"
    loss: Loss = "full"
    packed: bool = False
    document_length: float | None = None
    device_kind: DeviceKind = "cuda"

    @property
    def attended(self) -> float:
        """Tokens that attention works over: of a row, or of a document in it."""
        return min(self.document_length or self.max_length, self.max_length)


@dataclass(frozen=True)
class Layout:
    """One way to split the job over the ranks, and its memory choices.

    chunks: pipeline stages per rank (more than 1 for interleaved_1f1b and zbv). unit: what is gathered
    together, a block, everything, or so many blocks. reshard_after_forward: of the blocks; an integer keeps
    shards on so many ranks. cp_attention: how context-parallel ranks exchange keys and values.
    """

    axes: Axes = field(default_factory=Axes)
    data_parallel: DataParallel = "zero3"
    microbatch_rows: int = 1
    schedule: Schedule | None = None
    chunks: int = 1
    sequence_parallel: bool = True
    recompute: Recompute = "none"
    reshard_after_forward: bool | int = True
    prefetch: int = 1
    unit: Literal["block", "root"] | int = "block"
    offload: Literal["none", "params"] = "none"
    cp_attention: Literal["all_gather", "ring"] = "all_gather"

    def microbatches(self, job: Job) -> int:
        """Microbatches of each data rank in one update; the caller has checked that it divides."""
        return job.global_batch_size // (self.microbatch_rows * self.axes.data_ranks)

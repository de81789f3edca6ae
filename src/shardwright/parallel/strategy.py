"""One interface of everything that runs an update: `DDP`, `FSDP` and `Pipeline`.

The engine hands the microbatches of an update to a `Strategy` and reads complete gradients from the parameters. What is
gathered, reduced or sent in between, and in which order, is the strategy's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from shardwright.torch_private import drop_tensors


@dataclass(frozen=True)
class Microbatches:
    """The microbatches of one update on this data rank. Each function takes the number k of a microbatch, 0 <= k < count.

    inputs: the token ids [B, T], and the model's other arguments.
    before_forward: called with (k, pipeline stage) before each forward; it seeds the random generators.
    announce: tells a head that computes the loss itself the targets of its next forward.
    loss: from the output of the model and k to the scalar that is differentiated.
    loss_of_model: that scalar, where this rank holds the whole model: inputs, announce, forward and loss in one call.
    """

    count: int
    inputs: Callable[[int], tuple[Tensor, dict[str, Any]]]
    before_forward: Callable[[int, int], None]
    announce: Callable[[int], None]
    loss: Callable[[Any, int], Tensor]
    loss_of_model: Callable[[int], Tensor]


@dataclass(frozen=True)
class Ties:
    """The tied parameters that two pipeline ranks hold, by name: the first and the last stage share them.

    peer: the pipeline rank that holds the other copy. is_copy: this rank's are the copies of the last stage. The rank of the
    first stage counts them in the gradient norm.
    """

    names: tuple[str, ...] = ()
    peer: int = 0
    is_copy: bool = False

    @classmethod
    def between(cls, names: Sequence[str], rank: int, first: int, last: int) -> Ties:
        """The ties of pipeline rank `rank`, where the ranks `first` and `last` hold the parameters `names`."""
        if first == last or rank not in (first, last):  # one rank holds one tensor for both stages
            return cls()
        return cls(tuple(names), last if rank == first else first, rank == last)

    def is_counted_elsewhere(self, name: str) -> bool:
        """Whether the other rank counts the parameter `name`."""
        return self.is_copy and name in self.names


class Strategy(Protocol):
    """A model under a layout. Collective: every rank calls the same methods in the same order.

    module: this rank's part of the model, with the parameter names of the unsplit model. ties: parameters that two pipeline
    ranks hold.
    """

    module: nn.Module
    ties: Ties

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output, forward only; None on a pipeline rank without the last stage."""
        ...

    def forward_backward(self, batch: Microbatches) -> None:
        """Runs forward and backward of every microbatch. Gradients are complete after `finish_gradients` only."""
        ...

    def finish_gradients(self) -> None:
        """Completes the reductions over all axes. Afterwards each gradient is the sum over the whole update."""
        ...

    def release(self) -> None:
        """Ends a forward without backward: drops gathered parameters and waits for messages under way."""
        ...

    def close(self) -> None:
        """Frees the memory of weights and gradients. Nothing can run afterwards."""
        ...


class DataParallel(ABC):
    """Data parallelism of a model, or of a pipeline rank's stages. Gradients are summed over data ranks, never averaged.

    finishers: called in order once gradients are reduced over the data ranks; they sum over other axes.
    """

    module: nn.Module
    ties = Ties()
    finishers: tuple[Callable[[], None], ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @abstractmethod
    def microbatch(self, last: bool) -> AbstractContextManager[None]:
        """A context for forward and backward of one microbatch; `last`: it is the last one of the update."""

    @abstractmethod
    def reduce_gradients(self) -> None:
        """Completes the reductions over the data ranks."""

    @abstractmethod
    def release(self) -> None:
        """Drops gathered parameters."""

    def close(self) -> None:
        drop_tensors(self.module)

    def forward_backward(self, batch: Microbatches) -> None:
        for k in range(batch.count):
            batch.before_forward(k, 0)
            with self.microbatch(last=k == batch.count - 1):
                batch.loss_of_model(k).backward()

    def finish_gradients(self) -> None:
        self.reduce_gradients()
        for finish in self.finishers:
            finish()

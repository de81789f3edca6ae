"""What is decided at the end of an update, on the host or on the device: clip, step or skip, and what the update was.

On a GPU the host need not know the loss of an update before it launches the next one. Then the decision is made on the device:
gradients are clipped by a factor in device memory, and the optimizer's kernels change nothing where a value is not finite.
The three sums travel to pinned memory, and the host reads them one update later. Decision 0055.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.train.muon import Muon

TAKES_A_FLAG: tuple[type[torch.optim.Optimizer], ...] = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, Muon)
"""Optimizers whose fused steps change nothing where `found_inf` says so (torch 2.11 to 2.14)."""


@dataclass(frozen=True)
class UpdateResult:
    """What one update did. Every field is equal on all ranks.

    update: number of the update, from 0.
    loss: sum over targets / the batch's divisor, before the step.
    grad_norm: 2-norm of the whole gradient before clipping.
    clip_coefficient: the factor that gradients were multiplied with; 0 for a skipped update.
    learning_rate: of this step.
    target_tokens: of the whole update.
    skipped: loss or norm was not finite, so no weight was changed.
    stop: number of ranks that were asked to stop.
    """

    update: int
    loss: float
    grad_norm: float
    clip_coefficient: float
    learning_rate: float
    target_tokens: int
    skipped: bool
    stop: int


class PendingResult:
    """The result of an update whose step was launched. known: the host has it already.

    read: gives the result, or raises. on_wait: told that the host waits for the device.
    """

    def __init__(
        self,
        read: Callable[[], UpdateResult],
        numbers: Numbers | None = None,
        on_wait: Callable[[], object] = lambda: None,
    ) -> None:
        self._read, self._numbers, self._on_wait = read, numbers, on_wait
        self._result: UpdateResult | None = None

    @property
    def known(self) -> bool:
        """Whether the result was decided on the host."""
        return self._numbers is None

    def result(self) -> UpdateResult:
        """Waits for the update. Raises `NonFiniteError` on every rank alike where `training.on_non_finite` is stop."""
        if self._result is None:
            if self._numbers is not None and not self._numbers.arrived():
                self._on_wait()
            self._result = self._read()
        return self._result


class Numbers:
    """Numbers of a GPU on their way to the host. Reading them waits for the work before them, not for later work."""

    def __init__(self, values: Tensor) -> None:
        self._here = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._here.copy_(values, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record(torch.cuda.current_stream(values.device))

    def arrived(self) -> bool:
        """Whether `read` would not wait."""
        return self._copied.query()

    def read(self) -> list[float]:
        """The numbers."""
        self._copied.synchronize()
        return self._here.tolist()


def norm_of(squares: float) -> float:
    """The norm whose square is `squares`; NaN where there is none."""
    return math.sqrt(squares) if squares >= 0 else math.nan


def clip_coefficient(norm: float, limit: float | None) -> float:
    """The factor that brings a gradient of `norm` down to `limit`; 1 where the gradient is shorter."""
    return 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))


@dataclass(frozen=True)
class DeviceDecision:
    """The decision as 0-dim tensors of a GPU. coefficient: float64; 1.0 without a limit. skip: bool."""

    coefficient: Tensor | float
    skip: Tensor

    @classmethod
    def of(cls, sums: Tensor, count: Tensor | None, limit: float | None) -> DeviceDecision:
        """sums: (squared norm, loss, ...) in float64. count: targets, where the loss counts them; none is an error."""
        norm = sums[0].sqrt()
        finite = norm.isfinite() & sums[1].isfinite()
        if count is not None:
            finite = finite & (count > 0)
        coefficient = 1.0 if limit is None else quotient(limit, norm + 1e-6).clamp(max=1.0)
        return cls(coefficient, ~finite)


def quotient(number: float, tensor: Tensor) -> Tensor:
    """`number` / `tensor`, rounded once: torch's own operator multiplies by a rounded reciprocal (2.11 to 2.14)."""
    return torch.full_like(tensor, number) / tensor


def scale(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiplies gradients in place by a 0-dim tensor of float64, rounded to their dtype as a number would be."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for dtype, some in by_dtype.items():
        torch._foreach_mul_(some, factor.to(dtype))


def why_the_host_waits(device: torch.device, optimizer: torch.optim.Optimizer, tensors: Iterable[Tensor]) -> str:
    """Why the host must know the loss before it steps `tensors`; empty where a flag in device memory can skip the step.

    Fused steps take such a flag (torch 2.11 to 2.14), and so does `train.muon`.
    """
    if device.type != "cuda":
        return f"the run is on a {device.type}"
    kinds = list(tensors)
    if any(tensor.device.type != "cuda" for tensor in kinds):
        return "the optimizer runs on the host"
    if any(tensor.dtype not in (torch.float32, torch.float64) for tensor in kinds):
        return "a factor in device memory is rounded to the dtype of the stored weights"
    # another class, also one derived from these, may not look at the flag
    if type(optimizer) not in TAKES_A_FLAG or not optimizer.defaults.get("fused"):
        return f"{type(optimizer).__name__} cannot skip a step by a flag in device memory (fused)"
    return ""


def step_unless(optimizer: torch.optim.Optimizer, skip: Tensor | None) -> None:
    """One step; where `skip` (bool, 0-dim) is true, weights, moments and step counters stay as they are, bit for bit.

    The flag is the one that `torch.amp.GradScaler` sets on optimizers. Entries that a first step makes begin at 0 and would
    not exist after a skipped step, and SGD would leave them without a value (torch 2.11 to 2.14): the first step needs None.
    """
    any_optimizer: Any = optimizer
    any_optimizer.found_inf = None if skip is None else skip.float()
    try:
        optimizer.step()
    finally:
        any_optimizer.found_inf = None

"""Forces float64: a model that would convert values to float32 on the way keeps them in float64.

Many models compute parts in float32 whatever their dtype, Transformers' RMSNorm and softmax among them. Two layouts whose sums
differ in the last bits of float64 then differ by 2^-24 of a value wherever the conversion rounds the two sums differently. Tiny
models show no difference; a gradient of 35M parameters under tensor parallelism differs by 4e-8. In float64 on both sides the
difference is 1e-15.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardwright.config.schema import RunFile


class ForceFloat64(TorchFunctionMode):
    """A context in which float64 tensors are not converted to float32, by `float`, `to`, or the `dtype` of an operation."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            if given.get("dtype") is torch.float32:
                given["dtype"] = torch.float64
        return func(*args, **given)


def force_float64(run: RunFile) -> AbstractContextManager[Any]:
    """For forward and backward of `run`: `ForceFloat64` where it computes in float64 and compiles nothing."""
    wanted = run.precision.param_dtype == "fp64" and not run.memory.compile
    return ForceFloat64() if wanted else nullcontext()

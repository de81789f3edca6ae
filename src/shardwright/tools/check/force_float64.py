"""float64 throughout: what a model would round to float32 on its way stays float64.

Many models compute parts in float32 whatever their dtype, Transformers' RMSNorm and softmax among them. Two layouts whose sums
differ in the last bits of float64 then differ by 2^-24 of a value wherever such a rounding falls to the other side: nothing in
tiny models, 4e-8 of a gradient of 35M parameters under tensor parallelism. Kept in float64 on both sides, that is 1e-15 again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardwright.config.schema import RunFile


class Float64Throughout(TorchFunctionMode):
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


def float64_throughout(run: RunFile) -> AbstractContextManager[Any]:
    """For forward and backward of `run`: `Float64Throughout` where it computes in float64 and compiles nothing."""
    wanted = run.precision.param_dtype == "fp64" and not run.memory.compile
    return Float64Throughout() if wanted else nullcontext()

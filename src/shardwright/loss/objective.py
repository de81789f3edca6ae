"""The loss of an update: SUM over target tokens, divided once by the target tokens of the whole update.

B rows, T positions, V vocabulary. Labels come already shifted: labels[b, t] is the target of position t.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.errors import ConfigError, ShardwrightError, did_you_mean
from shardwright.layout.import_path import import_object
from shardwright.layout.loss import CROSS_ENTROPY, IGNORE_INDEX
from shardwright.loss.output_head import DeferredLoss
from shardwright.loss.vocab_parallel_loss import vocabulary_cross_entropy_sum, widened


def logits_of(model_output: Any) -> Tensor | DeferredLoss:
    """The logits [B, T, V], or the loss in their place, from what a model returned: a tensor, `.logits`, or a mapping."""
    if isinstance(model_output, Tensor):
        return model_output
    if isinstance(model_output, dict):
        return model_output["logits"]
    return model_output.logits


def forward_arguments(module: nn.Module) -> dict[str, Any]:
    """Keyword arguments beside input_ids: Transformers models must not keep keys and values in training."""
    return {"use_cache": False} if hasattr(module, "config") and hasattr(module, "generate") else {}


def cross_entropy_sum(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Sum over targets of weight * -log softmax(logits)[label], in float32 at least; labels of -100 count nothing.

    Shapes: logits [B, T, V], labels and weights [B, T]; returns a scalar. Without weights they are 1. bf16 logits are
    widened first: their cross entropy would be quantised. Logits that are a DTensor are divided by vocabulary (tensor
    parallelism): the sum is equal on all ranks.
    """
    if isinstance(logits, DTensor):
        return vocabulary_cross_entropy_sum(logits, labels, IGNORE_INDEX, weights)
    flat, targets = widened(logits).flatten(0, 1), labels.flatten()
    if weights is None:
        return F.cross_entropy(flat, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    losses = F.cross_entropy(flat, targets, ignore_index=IGNORE_INDEX, reduction="none")
    return (losses * weights.flatten()).sum()


OwnLoss = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor | float]]
"""(logits [B, T, V], labels [B, T] shifted with -100 where there is no target, weights [B, T] or None) ->
(sum of the loss over targets, number of targets or sum of their weights)."""


def own_loss(path: str) -> OwnLoss | None:
    """The function at `package.module:function`, its returns checked; None for the built-in cross entropy.

    It is given what this rank holds: its rows, of each its positions under cp; in the compute dtype. Raises `ConfigError`
    when there is none; the function raises `ShardwrightError` where it does not return a sum and a count.
    """
    if path == CROSS_ENTROPY:
        return None
    if ":" not in path:
        raise ConfigError(
            f"training.loss = {path!r} is not known.",
            did_you_mean(path, [CROSS_ENTROPY]),
            f"The loss is {CROSS_ENTROPY} or package.module:function.",
        )
    function = import_object(path, "training.loss")

    def checked(logits: Tensor, labels: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | float]:
        result = function(logits, labels, weights)
        if wrong := _what_is_wrong(result, logits):
            raise ShardwrightError(
                f"training.loss {path} returned {wrong}.",
                "The sum is divided once, by all targets of the update; means of microbatches would be another objective.",
                "Return (loss_sum, target_count): a scalar tensor made from the logits, and a number.",
            )
        return result

    return checked


def _what_is_wrong(result: Any, logits: Tensor) -> str:
    """What a loss function returned, in words, where it is not (loss_sum, target_count)."""
    if not isinstance(result, tuple) or len(result) != 2:
        return f"a {type(result).__name__}" + (f" of {len(result)}" if isinstance(result, tuple) else "")
    loss, count = result
    if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
        what = f"a tensor {list(loss.shape)} of {loss.dtype}" if isinstance(loss, Tensor) else repr(loss)
        return f"{what} as the loss sum"
    if logits.requires_grad and not loss.requires_grad:
        return "a loss sum without a graph"
    if isinstance(count, bool) or not isinstance(count, (int, float, Tensor)):
        return f"{count!r} as the target count"
    if isinstance(count, Tensor) and count.dim():
        return f"a tensor {list(count.shape)} as the target count"
    return ""

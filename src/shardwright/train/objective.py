"""The loss of an update: SUM over target tokens, divided once by the target tokens of the whole update.

B rows, T positions, V vocabulary. Labels come already shifted: labels[b, t] is the target of position t.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.parallel.vocabulary import vocabulary_cross_entropy_sum

IGNORE = -100


def logits_of(model_output: Any) -> Tensor:
    """The logits [B, T, V] in what a model returned: a tensor, an object with `.logits`, or a mapping."""
    if isinstance(model_output, Tensor):
        return model_output
    if isinstance(model_output, dict):
        return model_output["logits"]
    return model_output.logits


def forward_arguments(module: nn.Module) -> dict[str, Any]:
    """Keyword arguments beside input_ids: Transformers models must not keep keys and values in training."""
    return {"use_cache": False} if hasattr(module, "config") and hasattr(module, "generate") else {}


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum over targets of -log softmax(logits)[label], in float32 at least; labels of -100 count nothing.

    Shapes: logits [B, T, V], labels [B, T]; returns a scalar. bf16 logits are widened first: their cross entropy would
    be quantised. Logits that are a DTensor are divided by vocabulary (tensor parallelism): the sum is equal on all ranks.
    """
    if isinstance(logits, DTensor):
        return vocabulary_cross_entropy_sum(logits, labels, IGNORE)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")

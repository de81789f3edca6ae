"""Activation checkpointing and compilation of blocks, without wrappers: names of parameters stay as they are.

Only `block.forward` is replaced. Hooks of `fully_shard` run around it, so recomputation happens while the block's
parameters are gathered (the other order recomputes with resharded weights).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwright.torch_private import ATTENTION_OPERATORS

_SAVED = (*(getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm")), *ATTENTION_OPERATORS)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE


def recompute_block(block: nn.Module, mode: str) -> None:
    """Makes `block` drop activations in forward and recompute them in backward.

    mode: `full` keeps only the block's inputs. `selective` keeps the results of matrix products and attention too, which
    cost most to recompute. The state of the generators is restored for recomputation, so that dropout draws the same masks.
    """
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    forward: Callable[..., Any] = block.forward
    block.forward = partial(checkpoint, forward, **options)


def compile_block(block: nn.Module) -> None:
    """Compiles `block.forward`, recomputation included; hooks around the block stay outside the compiled region."""
    block.forward = torch.compile(block.forward)

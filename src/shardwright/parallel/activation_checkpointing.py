"""Activation checkpointing and compilation of blocks, without wrappers: names of parameters stay as they are.

Only `block.forward` is replaced. Hooks of `fully_shard` run around it, so recomputation happens while the block's
parameters are gathered (the other order recomputes with resharded weights).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwright.torch_private import ATTENTION_OPERATORS, MATRIX_PRODUCTS


def selective_contexts(mode: str, kept: Collection[Any]) -> Any:
    """The contexts of one forward of a block and of its recomputation: which results of operators are kept.

    mode: `selective` keeps every matrix product, `alternate` the first, the third, and so on, in the order of forward.
    kept: operators whose results are kept in both modes.
    """
    # products of the forward, and of the recomputation, which meets the same products in the same order
    seen: Counter[bool] = Counter()

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_kept = operator in kept
        if operator in MATRIX_PRODUCTS:
            seen[context.is_recompute] += 1
            is_kept = mode == "selective" or seen[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def recompute_block(block: nn.Module, mode: str, kept: Collection[Any] = ()) -> None:
    """Makes `block` drop activations in forward and recompute them in backward.

    mode: `full` keeps only the block's inputs. `selective` keeps too what costs most to compute again: the results of matrix
    products, of torch's attention, and of the operators `kept`: attention of our own, and sums over tensor-parallel ranks.
    `alternate` keeps only every second product. The state of the generators is restored for recomputation, so that dropout
    draws the same masks.
    """
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}
    if mode != "full":
        options["context_fn"] = partial(selective_contexts, mode, frozenset((*ATTENTION_OPERATORS, *kept)))
    forward: Callable[..., Any] = block.forward
    block.forward = partial(checkpoint, forward, **options)


def compile_block(block: nn.Module) -> None:
    """Compiles `block.forward`, recomputation included; hooks around the block stay outside the compiled region."""
    block.forward = torch.compile(block.forward)

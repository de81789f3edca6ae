"""How far two right computations of one number may lie apart; the one place where tests take their tolerances from.

A sum of n terms, in whichever order and by whichever instructions, is off by at most gamma_n = n u / (1 - n u) of the sum of
the terms' sizes, u being the unit roundoff (Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, section 3.1).
Roundings are as often up as down. They then come to c sqrt(n) u, except with probability 2 n exp(-c^2 / 2) (Higham and Mary,
A New Approach to Probabilistic Rounding Error Analysis, 2019, theorem 2.4). CONFIDENCE = 8 makes that 1e-14 n: once in a
hundred million comparisons of sums of a million terms.

Terms of both signs cancel: n of them add up to about sqrt(n) times one, while their sizes add up to n times one. Relative to
the result the bound is c sqrt(n) u x sqrt(n) = c n u (`mixed`); where all terms have one sign, c sqrt(n) u (`positive`).
Roundings of different reductions are independent, so reductions that follow each other add as squares, through all layers of
a network, forward and backward (`of_model`). Both of the computations compared are off by this much: every bound is doubled.

An optimizer makes small differences large: AdamW divides by the gradient's own size. How much, is no matter of rounding but of
the trajectory, and is measured: the oracle runs once more with every gradient disturbed by DISTURBANCE (`disturbed`), and what
comes of that disturbance is scaled down to the bound of the gradients (`Outcome.apart` in tests/gloo/engine.py).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

CONFIDENCE = 8.0
GROWTH = 2.0**20  # of a difference of gradients through a few steps of AdamW, in weights and gradients
LATER = 64.0  # in losses. The oracles measure both (`with_bounds`) and fail where they no longer hold
DISTURBANCE = 2.0**-30  # far above float64's roundoff and far below anything that is not linear any more


def unit_roundoff(dtype: torch.dtype = torch.float64) -> float:
    """The largest relative error of one rounding to nearest: 2^-53 in float64, 2^-24 in float32, 2^-8 in bfloat16."""
    return torch.finfo(dtype).eps / 2


def positive(*lengths: float, dtype: torch.dtype = torch.float64) -> float:
    """Relative to the result: sums of terms of one sign, of these lengths, one after the other."""
    return 2 * CONFIDENCE * unit_roundoff(dtype) * sum(lengths) ** 0.5


def mixed(*lengths: float, dtype: torch.dtype = torch.float64) -> float:
    """Relative to the largest result: sums of terms of both signs, of these lengths, one after the other."""
    return 2 * CONFIDENCE * unit_roundoff(dtype) * sum(n * n for n in lengths) ** 0.5


def of_model(weights: Mapping[str, Tensor], tokens: int, dtype: torch.dtype = torch.float64) -> float:
    """Relative to each tensor's largest entry: the loss and the gradients of a network, for `tokens` in an update.

    Each matrix sums over its columns forward, over its rows backward, and over the tokens for its own gradient; norms and
    biases over tokens. Attention's sums over keys are no longer than those over tokens, which its matrices have counted.
    """
    return mixed(*(n for p in weights.values() for n in (*p.shape, tokens)), dtype=dtype)


def moved(weights: Mapping[str, Tensor], tokens: int) -> float:
    """Relative to each tensor's largest entry, in float64: weights after a few steps, and gradients there. See GROWTH."""
    return GROWTH * of_model(weights, tokens)


def few(roundings: int, dtype: torch.dtype = torch.float64) -> float:
    """Relative: a formula of a handful of roundings, at its worst (gamma_n), where there are too few to count on luck."""
    n = roundings * unit_roundoff(dtype)
    return 2 * n / (1 - n)


def in_norm(roundings: int, dtype: torch.dtype) -> float:
    """Relative to the norm of a tensor: independent roundings of its entries, one after the other.

    The root mean square of one is u / sqrt(3); over many entries it is met closely, without a confidence factor.
    """
    return 2 * unit_roundoff(dtype) * roundings**0.5


def of_blocks(blocks: int, dtype: torch.dtype) -> float:
    """`in_norm` for gradients of a model that computes in `dtype`: about twelve tensors of a block are rounded, each way."""
    return in_norm(2 * 12 * blocks, dtype)


def disturbed(gradient: Tensor, generator: torch.Generator) -> Tensor:
    """The gradient, each entry that is not zero up or down by DISTURBANCE of the tensor's root mean square."""
    sign = torch.randint(0, 2, gradient.shape, generator=generator) * 2.0 - 1
    return gradient + DISTURBANCE * gradient.square().mean().sqrt() * sign * (gradient != 0)

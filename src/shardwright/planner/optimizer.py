"""What each optimizer keeps, moves and computes: the one table that memory, bounds and time read."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

from shardwright.arch.families import family_of
from shardwright.arch.parameters import parameters
from shardwright.arch.shape import ParameterGroup, Shape

NEWTON_SCHULZ_STEPS = 5
"""Iterations of `train/muon.py`; each multiplies r x c by its transpose, r x r by r x r, and r x r by r x c."""


class Optimizer(NamedTuple):
    """One optimizer. States are of the master dtype. Matrices: two-dimensional weights of blocks, not embedding and head."""

    states: int  # per parameter that is no matrix
    matrix_states: int  # per element of a matrix
    moved: int  # bytes read and written per parameter by a step and by clearing the gradient, of fp32 states
    matrix_moved: int
    temporaries: int = 0  # values per element made while a parameter that is no matrix is updated, one at a time
    orthogonalises: bool = False  # gathers each whole matrix on every rank and makes it orthogonal there

    def states_of(self, group: ParameterGroup) -> int:
        """States per element of a parameter."""
        return self.matrix_states if is_matrix(group) else self.states


OPTIMIZERS = {
    # Words of 4 bytes. Fused: parameter, gradient and both moments read, all but the gradient written, the gradient cleared.
    "adamw": Optimizer(2, 2, moved=32, matrix_moved=32),
    "sgd": Optimizer(1, 1, moved=24, matrix_moved=24),  # with momentum
    # `train/muon.py` is not fused. AdamW's part: decay 2, two moments 3 + 2 + 4, denominator 2 + 2 + 2, step 4, gradient 1.
    # A matrix: decay 2, momentum 3, what is made orthogonal 3, step 3, gradient 1.
    "muon": Optimizer(2, 1, moved=88, matrix_moved=48, temporaries=2, orthogonalises=True),
}


def optimizer_of(name: str) -> Optimizer:
    """The entry of this name; one that is not ours counts as AdamW."""
    return OPTIMIZERS.get(name, OPTIMIZERS["adamw"])


def is_matrix(group: ParameterGroup) -> bool:
    """Whether Muon takes the parameter as a matrix: two dims, and no table that tokens or positions index."""
    return len(group.size) == 2 and group.part not in ("embedding", "positions", "head")


@lru_cache(maxsize=256)
def block_matrices(shape: Shape) -> tuple[ParameterGroup, ...]:
    """The matrices of one block."""
    inside = family_of(shape.family).block + "."
    return tuple(group for group in parameters(shape) if group.name.startswith(inside) and is_matrix(group))


def orthogonalising_bytes(shape: Shape, master: int) -> int:
    """Most bytes alive while one matrix is made orthogonal: gathered, before and after an iteration, and two products.

    Iterations are in bf16, in float64 where the master dtype is.
    """
    width = 8 if master == 8 else 2
    matrices = block_matrices(shape)
    return max((prod(g.size) * (master + 2 * width) + 2 * width * min(g.size) ** 2 for g in matrices), default=0)

"""Muon for the reference, in another way than the engine's: the iteration acts on the singular values of the momentum.

Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon): five steps s -> 3.4445 s - 4.7750 s^3 + 2.0315 s^5 on the
singular values of momentum / its norm. Steps are scaled as in Liu et al. 2025 (arXiv:2502.16982), section 2.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

AMPLIFICATION = 3.4445**5
"""The slope of the iteration at 0, its largest: the largest factor on a small change of the momentum."""


def orthogonal(matrix: Tensor) -> Tensor:
    """`matrix` [m, n] with its singular values moved near 1 by the iteration."""
    u, s, v = torch.linalg.svd(matrix / matrix.norm().clamp(min=1e-7), full_matrices=False)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ v


class ReferenceMuon(torch.optim.Optimizer):
    """Groups with `orthogonal` true get Muon steps, the others AdamW; whole matrices in one process."""

    def __init__(
        self,
        params: list[dict[str, Any]],
        lr: float,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            rate = group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                decayed = p - rate * group["weight_decay"] * p
                if group["orthogonal"]:
                    b = group["momentum"]
                    buffer = b * state.get("momentum_buffer", torch.zeros_like(p)) + (1 - b) * p.grad
                    state["momentum_buffer"] = buffer
                    step = 0.2 * max(p.shape) ** 0.5 * orthogonal((1 - b) * p.grad + b * buffer)
                else:
                    step = self._adam(p.grad, state, group)
                p.copy_(decayed - rate * step)

    @staticmethod
    def _adam(gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        (b1, b2), zero = group["betas"], torch.zeros_like(gradient)
        count = state["step"] = state.get("step", torch.zeros(())) + 1
        state["exp_avg"] = b1 * state.get("exp_avg", zero) + (1 - b1) * gradient
        state["exp_avg_sq"] = b2 * state.get("exp_avg_sq", zero) + (1 - b2) * gradient**2
        n = count.item()
        return state["exp_avg"] / (1 - b1**n) / ((state["exp_avg_sq"] / (1 - b2**n)).sqrt() + group["eps"])

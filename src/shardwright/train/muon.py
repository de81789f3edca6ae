"""Muon for hidden matrices and AdamW for the rest, over shards.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) replaces the momentum of a matrix by the nearest
semi-orthogonal matrix, which needs the whole matrix. The momentum is gathered from the shards, made orthogonal on every rank of
the mesh alike, and each rank keeps its part. Steps are scaled as in Liu et al. 2025 (arXiv:2502.16982), section 2.2, so that
one learning rate serves both kinds of parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from shardwright.mesh.shard_geometry import full_tensor, own_part

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrix: Tensor, steps: int = 5, eps: float = 1e-7) -> Tensor:
    """The semi-orthogonal matrix nearest to `matrix` [m, n], by a quintic Newton-Schulz iteration.

    Runs in float64 for float64, else in bf16: the iteration is not sensitive to rounding.
    """
    a, b, c = COEFFICIENTS
    x = matrix if matrix.dtype == torch.float64 else matrix.bfloat16()
    tall = x.size(0) > x.size(1)
    x = x.T if tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """Groups with `orthogonal` true get Muon steps, the others AdamW.

    `wrap` maps a parameter of this optimizer and a tensor shaped like it to the DTensor of the unsplit shape (or returns
    the tensor where nothing is sharded). Collective over each parameter's mesh, in the order of the parameters.
    """

    def __init__(
        self,
        params: list[dict[str, Any]],
        lr: float,
        wrap: Callable[[Tensor, Tensor], Tensor],
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        fused: bool = False,
    ) -> None:
        """fused: parameters are on a GPU. Then torch's fused kernel makes the AdamW steps, and `found_inf` can skip a step."""
        defaults = {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "orthogonal": False, "fused": fused})
        self._wrap = wrap
        self.found_inf: Tensor | None = None
        """0-dim float: 1 where the next step changes nothing. Only where `fused`."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            present = [p for p in group["params"] if p.grad is not None]
            if group["orthogonal"]:
                for p in present:
                    self._orthogonal(p, group)
            elif group["fused"] and present:
                self._fused_adam(present, group)
            else:
                for p in present:
                    self._adam(p, group)

    def _orthogonal(self, p: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
        buffer = state["momentum_buffer"]
        gradient, before = cast(Tensor, p.grad), [] if self.found_inf is None else [p.clone(), buffer.clone()]
        p.mul_(1 - group["lr"] * group["weight_decay"])
        buffer.lerp_(gradient, 1 - group["momentum"])
        wanted = self._wrap(p, gradient.lerp(buffer, group["momentum"]))
        whole = full_tensor(wanted)
        step = own_part(orthogonalise(whole), wanted).to(p.dtype)
        p.add_(step, alpha=-group["lr"] * 0.2 * max(whole.shape) ** 0.5)
        for tensor, old in zip((p, buffer), before):
            tensor.copy_(torch.where(cast(Tensor, self.found_inf) > 0, old, tensor))

    def _fused_adam(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        states = [self.state[p] for p in parameters]
        for p, state in zip(parameters, states):
            if not state:
                step = torch.zeros((), device=p.device)
                state.update(step=step, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        adamw(
            parameters,
            [cast(Tensor, p.grad) for p in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            found_inf=self.found_inf,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _adam(self, p: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        p.mul_(1 - group["lr"] * group["weight_decay"])
        state["step"] += 1
        beta1, beta2 = group["betas"]
        state["exp_avg"].lerp_(p.grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
        count = state["step"].item()
        scale = (1 - beta2**count) ** 0.5
        denominator = (state["exp_avg_sq"].sqrt() / scale).add_(group["eps"])
        p.addcdiv_(state["exp_avg"], denominator, value=-group["lr"] / (1 - beta1**count))

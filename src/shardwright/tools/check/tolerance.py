"""How far a layout may be from the reference, and where each number comes from.

Every comparison reads |candidate - reference| <= allowed, and a result is `used` = the largest |difference| / allowed.

Gradient norm: allowed = r x |reference|. Loss: r / sqrt(targets), since it is a mean over them; r itself in float64.
A gradient tensor: allowed = r x max(max|reference|, FLOOR x G), with G the largest |gradient| of the whole model in this
update. The floor is for gradients that are zero in exact arithmetic (the bias of a key projection): they are rounding
noise of the size of G x eps, so they have no relative error of their own. A tensor whose true gradient is above
r x FLOOR x G still fails when it is wrong by its own size.
First moments are linear in the clipped gradient, whose coefficient adds another r: allowed = 2 r x max(max|m|, FLOOR x M).
Second moments are squares: allowed = 4 r x max(max|v|, FLOOR^2 x V).

Parameters after AdamW need a derivation, because its update u = m / (sqrt(v) + epsilon) (bias-corrected) is like a sign
near zero: a gradient of 1e-18 and one of -1e-18 move a parameter in opposite directions. If no element of the clipped
gradient of any update so far is off by more than d, then m is off by at most d (its weights add to 1), sqrt(v) by at
most d (a weighted quadratic mean is 1-Lipschitz), so u is off by at most d (1 + |u|) / (sqrt(v) + epsilon), and never by more
than 2 max(1, |u|). The parameter, element by element, may therefore differ by
    sum over updates of lr x [min(d (1 + |u|) / (sqrt(v) + epsilon), 2 max(1, |u|)) + r |u|] + 8 updates eps max|parameter|
with m, v, u of the reference and d twice the allowed difference of that gradient, clipped (the coefficient has its own r).
Where gradients are not negligible this is far below the learning rate; a wrong step is about the learning rate itself.
Parameters after SGD: lr x 2 d / (1 - momentum) for each update, and the same rounding term.
Parameters after Muon: the iteration magnifies a small change of the momentum, relative to its norm, by at most its slope
at 0, 3.4445^5 = 485, and the normalisation by 2: lr x 0.2 sqrt(largest dim) x min(970 d sqrt(elements) / norm, 2.4).

From the second update on, the two sides start from weights that were allowed to differ, by a part p of the last step
(norm of the difference / norm of the step). Gradients then differ by about that part of what a step changes, where a few
weights that differ weigh much (one element of a norm's bias reaches a whole row) by more: r becomes r + min(10 p, 0.1). In
float64 p is about 1e-13; in float32 it is what the sign-like steps near zero leave (2e-6 to 2e-5 in the tiny examples).
Parts that models compute in float32 stay float64 in a float64 check (`force_float64.py`): r covers sums in another order only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.dtypes import DTYPES
from shardwright.tools.check.record import Notes, Record, Scalars
from shardwright.tools.check.reference_muon import AMPLIFICATION

FLOOR = 1e-3


@dataclass(frozen=True)
class Tolerance:
    """The relative tolerance r of gradients, that of the loss, the eps of stored weights, and the text to print."""

    relative: float
    loss: float
    master_eps: float
    formula: str

    @property
    def fit(self) -> float:
        """Relative difference up to which a number matches a fault: looser than r, far tighter than a fault."""
        return min(max(100 * self.relative, 1e-6), 0.1)

    def factor(self, kind: str) -> float:
        """How many r a kind of tensor may differ by, relative to its scale."""
        return {"grad": 1.0, "exp_avg": 2.0, "momentum_buffer": 2.0}.get(kind, 4.0)


def float64_tolerance(relative: float = 1e-9) -> Tolerance:
    """float64 throughout: r = 1e-9 is about 1e5 times the rounding, and about 1e5 times below any fault that matters."""
    return Tolerance(relative, relative, DTYPES["fp64"].eps, f"r = {relative:g} (float64)")


def run_dtype_tolerance(
    param: str, reduce: str, master: str, *, blocks: int, microbatches: int, ranks: int, tokens: int
) -> Tolerance:
    """r for the run's own dtypes against a float64 reference; `tokens` of an update, `microbatches` of a rank.

    One rounding has an error of at most u = eps / 2, of u / sqrt(3) typically; errors of independent signs grow with the
    square root of their number. A gradient passes about 12 roundings to the compute dtype per block, forward and backward
    (two norms, up to seven projections, activation, residuals), and one per microbatch that is accumulated. It is a sum
    over all tokens, kept in float32 or wider inside a matrix product, and is reduced over ranks. The factor 4 is for the
    largest of many elements where these terms are for a typical one.
    """
    accumulate = "fp64" if param == "fp64" else "fp32"
    parts = ((param, 12 * blocks + microbatches), (accumulate, tokens), (reduce, ranks))
    relative = 4 / math.sqrt(3) * sum(DTYPES[dtype].eps / 2 * math.sqrt(count) for dtype, count in parts)
    formula = (
        f"r = 4 / sqrt(3) x [u({param}) sqrt(12 x {blocks} blocks + {microbatches} microbatches) + u({accumulate}) "
        f"sqrt({tokens} tokens) + u({reduce}) sqrt({ranks} ranks)] = {relative:.2g} with u = eps / 2; loss r / sqrt(tokens)"
    )
    return Tolerance(relative, relative / math.sqrt(tokens), DTYPES[master].eps, formula)


class ParameterAllowance:
    """The allowed difference of each parameter after a step, element by element; the bound grows from update to update."""

    def __init__(self, notes: Notes, tolerance: Tolerance) -> None:
        self.notes, self.tolerance = notes, tolerance
        self._grown: dict[str, Tensor] = {}
        self._gradient: dict[str, float] = {}

    def grow(
        self, record: Record, update: int, scalars: Scalars, gradient_scales: dict[str, float], relative: float
    ) -> None:
        """Adds what update `update` may contribute; its gradients were compared with `relative` of `gradient_scales`."""
        states = {kind: record.tensors(update, kind) for kind in record.kinds(update) if kind not in ("grad", "param")}
        for name, scale in gradient_scales.items():
            clipped = 2 * relative * scale * scalars.clip_coefficient
            gradient = self._gradient[name] = max(self._gradient.get(name, 0.0), clipped)
            held = {kind: file[name] for kind, file in states.items() if name in file.names}
            if self.notes.optimizer == "muon" and "momentum_buffer" in held:
                own = record.tensors(update, "grad")[name] * scalars.clip_coefficient
                step = self._orthogonal_step(gradient, held["momentum_buffer"], own)
            else:
                step = self._step(gradient, held, update, relative)
            self._grown[name] = self._grown.get(name, 0.0) + scalars.learning_rate * step

    def _step(self, gradient: float, state: dict[str, Tensor], update: int, relative: float) -> Tensor:
        if "exp_avg" not in state:
            # 10 for an optimizer of the user's own: a normalised step magnifies an error by its own scale
            factor = (1 if self.notes.optimizer == "sgd" else 10) / (1 - self.notes.momentum)
            return torch.tensor(gradient * factor, dtype=torch.float64)
        beta1, beta2, epsilon = (self.notes.adam[key] for key in ("beta1", "beta2", "epsilon"))
        m = state["exp_avg"].double() / (1 - beta1**update)
        root = (state["exp_avg_sq"].double() / (1 - beta2**update)).sqrt() + epsilon
        u = (m / root).abs()
        return torch.minimum(gradient * (1 + u) / root, 2 * u.clamp(min=1.0)) + relative * u

    def _orthogonal_step(self, gradient: float, buffer: Tensor, own: Tensor) -> Tensor:
        """What an error of `gradient` in each element may change in a step of Muon; `own` is the clipped gradient."""
        norm = torch.lerp(own, buffer, self.notes.momentum).norm()
        changed = torch.clamp(2 * AMPLIFICATION * gradient * buffer.numel() ** 0.5 / norm, max=2.4)
        return 0.2 * max(buffer.shape) ** 0.5 * changed

    def allowed(self, name: str, reference: Tensor, update: int) -> Tensor:
        """The bound of every element of parameter `name`, whose value in the reference is `reference`."""
        rounding = 8 * update * self.tolerance.master_eps * reference.abs().max().double()
        return (rounding + self._grown.get(name, torch.zeros((), dtype=torch.float64))).expand(reference.shape)

"""How far each parameter may be from the reference after a step, element by element; tolerance.py has the derivation."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwright.tools.check.record import Notes, Record, Scalars
from shardwright.tools.check.reference_muon import AMPLIFICATION
from shardwright.tools.check.tolerance import Tolerance


class ParameterAllowance:
    """The allowed difference of each parameter, grown from update to update as tolerance.py derives it."""

    def __init__(self, notes: Notes, tolerance: Tolerance) -> None:
        self.notes, self.tolerance = notes, tolerance
        self.grown: dict[str, Tensor] = {}
        self.gradient: dict[str, float] = {}

    def grow(
        self,
        record: Record,
        update: int,
        scalars: Scalars,
        gradient_scales: dict[str, float],
        relative: float,
    ) -> None:
        """Adds what update `update` may contribute; its gradients were compared with `relative` of `gradient_scales`."""
        states = {kind: record.tensors(update, kind) for kind in record.kinds(update) if kind not in ("grad", "param")}
        for name, scale in gradient_scales.items():
            clipped = 2 * relative * scale * scalars.clip_coefficient
            self.gradient[name] = max(self.gradient.get(name, 0.0), clipped)
            held = {kind: file[name] for kind, file in states.items() if name in file.names}
            if self.notes.optimizer == "muon" and "momentum_buffer" in held:
                own = record.tensors(update, "grad")[name] * scalars.clip_coefficient
                step = scalars.learning_rate * self._orthogonal_step(self.gradient[name], held["momentum_buffer"], own)
            else:
                step = scalars.learning_rate * self._step(self.gradient[name], held, update, relative)
            self.grown[name] = self.grown.get(name, 0.0) + step

    def _step(self, gradient: float, state: dict[str, Tensor], update: int, relative: float) -> Tensor:
        if "exp_avg" not in state:
            # 10 for optimizers that are neither: an orthogonalised or normalised step magnifies by its own scale.
            return torch.tensor(
                gradient / (1 - self.notes.momentum) * (1 if self.notes.optimizer == "sgd" else 10),
                dtype=torch.float64,
            )
        beta1, beta2, epsilon = (self.notes.adam[key] for key in ("beta1", "beta2", "epsilon"))
        m = state["exp_avg"].double() / (1 - beta1**update)
        root = (state["exp_avg_sq"].double() / (1 - beta2**update)).sqrt() + epsilon
        u = (m / root).abs()
        sensitive = torch.minimum(gradient * (1 + u) / root, 2 * u.clamp(min=1.0))
        return sensitive + relative * u

    def _orthogonal_step(self, gradient: float, buffer: Tensor, own: Tensor) -> Tensor:
        """What an error of `gradient` in each element may change in a step of Muon; `own` is the clipped gradient."""
        norm = torch.lerp(own, buffer, self.notes.momentum).norm()
        changed = torch.clamp(2 * AMPLIFICATION * gradient * buffer.numel() ** 0.5 / norm, max=2.4)
        return 0.2 * max(buffer.shape) ** 0.5 * changed

    def allowed(self, name: str, reference: Tensor, update: int) -> Tensor:
        rounding = 8 * update * self.tolerance.master_eps * reference.abs().max().double()
        return (rounding + self.grown.get(name, torch.zeros((), dtype=torch.float64))).expand(reference.shape)

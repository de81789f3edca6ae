"""Seeding of torch's random generators."""

from __future__ import annotations

import torch


def seed_generators(value: int) -> None:
    """Seeds the generator of the CPU and those of the GPUs in use.

    `torch.manual_seed` also leaves word for devices that nothing has used yet, with a formatted stack for each: 1.5 ms.
    """
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value)

"""Random numbers of a tensor-parallel rank: a common stream for whole tensors, one stream per rank for divided tensors.

All ranks seed their generators alike before each microbatch (`train/rng.py`). Where work is divided, this rank switches to
a seed made of a number drawn from the common stream and its rank. After divided work the common stream goes on where it
stopped. Nothing is kept from one block to the next: recomputation restores the generators of the start of a block and draws
the same numbers again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwright.models.initialization import seed_generators

_ODD = 0x9E3779B97F4A7C15
"""An odd factor of the rank: it changes the low bits too. The CPU generator uses only those."""


class RNGStreams:
    """Switches the generators of one rank between the two streams. A call for the current stream has no effect."""

    def __init__(self, rank: int, device_type: str) -> None:
        self._rank = rank
        self._device = None if device_type == "cpu" else torch.get_device_module(device_type)
        self._common: tuple[Tensor, Tensor | None] | None = None

    def divided(self) -> None:
        """From now on this rank draws numbers of its own."""
        if self._common is not None:
            return
        drawn = int(torch.randint(2**62, (), device="cpu"))
        on_device = None if self._device is None else self._device.get_rng_state()
        self._common = (torch.get_rng_state(), on_device)
        seed_generators((drawn + self._rank * _ODD) % 2**63)

    def common(self) -> None:
        """From now on this rank draws the same numbers as its peers."""
        if self._common is None:
            return
        on_cpu, on_device = self._common
        self._common = None
        torch.set_rng_state(on_cpu)
        if self._device is not None:
            self._device.set_rng_state(on_device)

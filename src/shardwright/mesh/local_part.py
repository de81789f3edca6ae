"""What forward reads of a stored parameter, where that is a DTensor of the tensor-parallel axis.

Layers compute on plain local tensors and exchange what they must themselves: no operation goes through DTensor. The
stored parameter stays a DTensor, so that state, names and full shapes are those of the unsplit model.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_part(stored: Tensor) -> Tensor:
    """This rank's part of `stored` as a plain tensor through which gradients flow, or `stored` itself."""
    return stored.to_local() if isinstance(stored, DTensor) else stored

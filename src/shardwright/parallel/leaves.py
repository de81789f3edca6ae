"""What forward reads of a stored parameter, where that is a DTensor of the tensor-parallel axis.

Layers compute on plain local tensors and exchange what they must themselves: no operation goes through DTensor. The
stored parameter stays a DTensor, so that state, names and full shapes are those of the unsplit model.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_LEAF = "_shardwright_leaf"


def local_part(stored: Tensor) -> Tensor:
    """This rank's part of `stored` as a plain tensor through which gradients flow: its leaf, a view, or `stored` itself."""
    leaf = getattr(stored, _LEAF, None)
    if leaf is not None:
        return leaf
    return stored.to_local() if isinstance(stored, DTensor) else stored


def make_leaf(stored: nn.Parameter) -> nn.Parameter:
    """A plain parameter on the memory of this rank's part of `stored`, which forward reads from now on.

    For reducers that know no DTensor (DDP). A plain parameter is its own leaf.
    """
    if not isinstance(stored, DTensor):
        return stored
    leaf = nn.Parameter(stored.to_local().detach(), requires_grad=stored.requires_grad)
    setattr(stored, _LEAF, leaf)
    return leaf


def give_gradient(stored: nn.Parameter) -> None:
    """Moves the gradient of the leaf of `stored` to `stored`, as a DTensor placed like it."""
    leaf = getattr(stored, _LEAF, None)
    if leaf is None or leaf.grad is None or not isinstance(stored, DTensor):
        return
    stored.grad = DTensor.from_local(
        leaf.grad,
        stored.device_mesh,
        stored.placements,
        run_check=False,
        shape=stored.shape,
        stride=stored.stride(),
    )
    leaf.grad = None

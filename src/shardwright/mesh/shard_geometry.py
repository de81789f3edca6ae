"""Which part of a tensor a rank holds: the one place that knows how placements cut.

A mesh dimension cuts a tensor dimension into pieces as `torch.chunk` makes them: each rank gets ceil(n / ranks) rows as long
as there are rows, so that the last ranks may hold fewer, or none. Mesh dimensions cut from left to right. The exception is
`_StridedShard`, the placement that `fully_shard` gives a tensor which tensor parallelism (to its right in the mesh) has cut
before: it cuts last (torch 2.11 to 2.14; DTensor's own function is the reference in `tests/unit/mesh`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.errors import ShardwrightError
from shardwright.torch_private import is_strided, place_like


@dataclass(frozen=True)
class Box:
    """A part of a tensor: its first index and its length in each dim."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The indices of this box in the whole tensor."""
        return tuple(slice(first, first + length) for first, length in zip(self.start, self.shape))

    def meet(self, other: Box) -> Box | None:
        """The part that both hold, or None. The one element of a 0-dim tensor is a box too."""
        start = tuple(map(max, self.start, other.start))
        ends = (min(a + n, b + m) for a, n, b, m in zip(self.start, self.shape, other.start, other.shape))
        shape = tuple(end - first for end, first in zip(ends, start))
        return Box(start, shape) if all(length > 0 for length in shape) else None

    def within(self, other: Box) -> tuple[slice, ...]:
        """The indices of this box in a tensor that holds `other`."""
        return tuple(slice(a - b, a - b + n) for a, b, n in zip(self.start, other.start, self.shape))


def chunk(length: int, ranks: int, rank: int) -> tuple[int, int]:
    """(first row, number of rows) of `rank` where `length` rows are cut over `ranks`."""
    rows = -(-length // ranks)
    first = min(rank * rows, length)
    return first, min(rows, length - first)


def box_at(
    shape: Sequence[int],
    placements: Sequence[Any],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    name: str = "a tensor",
) -> Box:
    """The part of a tensor of `shape` that the rank at `coordinate` of a mesh of `mesh_shape` holds.

    Raises `ShardwrightError` for a partial sum: no rank holds a part of its value.
    """
    start, lengths = [0] * len(shape), list(shape)
    cuts = [(placement, dim) for dim, placement in enumerate(placements) if not placement.is_replicate()]
    for placement, mesh_dim in sorted(cuts, key=lambda cut: is_strided(cut[0])):
        if placement.is_partial():
            raise ShardwrightError(
                f"{name} {tuple(shape)} is placed as {tuple(placements)}.",
                "A partial sum is not the value of the tensor.",
            )
        dim = placement.dim
        first, lengths[dim] = chunk(lengths[dim], mesh_shape[mesh_dim], coordinate[mesh_dim])
        start[dim] += first
    return Box(tuple(start), tuple(lengths))


def box_of(tensor: Tensor, name: str = "a tensor") -> Box:
    """The part that this rank holds of `tensor`: the whole tensor unless it is a DTensor. name: for errors.

    Raises `ShardwrightError` where the local tensor has another shape than the placements say.
    """
    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.dim(), tuple(tensor.shape))
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ShardwrightError(f"This rank is not part of the mesh of {name}, of which it holds a part.")
    box = box_at(tensor.shape, tensor.placements, mesh.shape, coordinate, name)
    found = tuple(tensor.to_local().shape)
    if found != box.shape:
        raise ShardwrightError(
            f"This rank's part of {name} {tuple(tensor.shape)} has the shape {found}, not {box.shape}.",
            f"The placements {tensor.placements} cut the tensor in a way that is not known here.",
        )
    return box


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of `tensor` as a plain tensor through which gradients flow; `tensor` itself where it is plain.

    Layers compute on local tensors and communicate themselves, so that no operation goes through DTensor's dispatch. The
    stored parameter stays a DTensor: state, names and full shapes are those of the unsplit model.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """The unsplit tensor on every rank; collective for a DTensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def from_local(local: Tensor, like: Tensor) -> Tensor:
    """`local`, shaped like this rank's part of `like`, as a tensor placed like `like`."""
    if not isinstance(like, DTensor) or isinstance(local, DTensor):
        return local
    if local.device.type != like.device_mesh.device_type and not local.is_meta:  # a shard that stays on the host
        return place_like(local, like)
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def own_part(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of `whole`, where it is placed as `like`; all of it where `like` is a plain tensor."""
    return whole[box_of(like).slices]

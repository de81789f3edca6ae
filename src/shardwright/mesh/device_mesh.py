"""The only home of device meshes: one mesh per run, its dimensions named as in `layout/axes.py`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from shardwright.layout.axes import AXES, Axes

FLATTENED = {"dp_shard_cp": ("dp_shard", "cp"), "dp_replicate_cp": ("dp_replicate", "cp")}
"""Names of dimensions made of several axes: parameters are sharded over context-parallel ranks too."""


def make_mesh(axes: Axes, device: torch.device) -> DeviceMesh:
    """The mesh of all five axes, outer to inner; axes of size 1 are there too, so that no rank count is special.

    Collective: every rank of the default process group calls it.
    """
    return init_device_mesh(device.type, axes.sizes, mesh_dim_names=AXES)


def flattened(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """The one dimension `name` of `FLATTENED` over the axes that it is made of. Collective when first asked for."""
    return mesh[FLATTENED[name]]._flatten(name)


def replica_group(mesh: DeviceMesh) -> ProcessGroup:
    """The ranks of `ddp` that hold the same parameters and other tokens. Collective."""
    if mesh["cp"].size() == 1:
        return mesh["dp_replicate"].get_group()
    return flattened(mesh, "dp_replicate_cp").get_group()


def shard_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh of `fully_shard`: shards, or replicas by shards where there are replicas. Collective.

    Context-parallel ranks hold other tokens of the same rows: parameters are sharded over them too.
    """
    hybrid = mesh["dp_replicate"].size() > 1
    if mesh["cp"].size() == 1:
        return mesh["dp_replicate", "dp_shard"] if hybrid else mesh["dp_shard"]
    shards = flattened(mesh, "dp_shard_cp")
    return DeviceMesh._concatenate([mesh["dp_replicate"], shards]) if hybrid else shards


def axis_of_groups(mesh: DeviceMesh) -> dict[str, str]:
    """Name of a process group of this rank -> axis as `layout/traffic.py` spells it; groups of one rank are left out.

    The groups of several axes (`FLATTENED`) have the name of the first, or of `cp` where the first has one rank: torch then
    has one group for both. Collective as `flattened`.
    """
    found: dict[str, str] = {}
    for axis in AXES:
        if mesh[axis].size() > 1:
            found[mesh[axis].get_group().group_name] = axis
    for name, axes in FLATTENED.items():
        if mesh["cp"].size() > 1:
            found[flattened(mesh, name).get_group().group_name] = axes[0] if mesh[axes[0]].size() > 1 else "cp"
    return found


def all_groups(mesh: DeviceMesh) -> dict[str, str]:
    """`axis_of_groups`, and the group of every rank as `all ranks` where no axis has it. Collective as `flattened`."""
    assert dist.group.WORLD is not None, "a mesh needs a default group"
    return {dist.group.WORLD.group_name: "all ranks", **axis_of_groups(mesh)}


def to_local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor as a plain tensor through which gradients flow; a plain tensor as it is.

    Layers compute on plain tensors and call their collectives themselves: no operation goes through DTensor. Stored parameters
    stay DTensors, so that state, names and shapes are those of the unsplit model.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

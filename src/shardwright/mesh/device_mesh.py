"""The only home of device meshes: one mesh per run, its dimensions named as in `layout/axes.py`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwright.layout.axes import AXES, ROW_AXES, Axes
from shardwright.torch_private import FAKE, concatenate_meshes, flatten_mesh, has_fake_backend

FLATTENED = {"_".join(axes): axes for axes in (("dp_shard", *ROW_AXES), ("dp_replicate", *ROW_AXES))}
"""Name of a dimension -> its axes. Ranks of `ROW_AXES` hold the same parameters and other tokens, as data-parallel ranks do:
parameters are sharded over them, and gradients summed, in one group with a data axis."""


def make_mesh(axes: Axes, device: torch.device) -> DeviceMesh:
    """The mesh of all five axes, outer to inner; axes of size 1 are there too, so that no rank count is special.

    An axis of one rank has no communicator: NCCL's would take memory of the GPU and, on thousands of ranks, seconds. All such
    axes share one group of torch's backend `fake`, which copies inputs to outputs. Collective: every rank of the default
    process group calls it.
    """
    divided = {axis: size for axis, size in zip(AXES, axes.sizes) if size > 1}
    names = tuple(AXES)
    if len(divided) == len(names) or not divided or not has_fake_backend():
        return init_device_mesh(device.type, axes.sizes, mesh_dim_names=names)
    groups = init_device_mesh(device.type, tuple(divided.values()), mesh_dim_names=tuple(divided))
    # made by this rank alone: else every rank would take part in making the group of every other
    alone = dist.new_group([dist.get_rank()], backend=FAKE, use_local_synchronization=True)
    ranks = torch.arange(dist.get_world_size()).view(axes.sizes)
    members = [groups.get_group(axis) if axis in divided else alone for axis in names]
    return DeviceMesh.from_group(members, device.type, ranks, mesh_dim_names=names)


def flattened(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """The one dimension `name` of `FLATTENED` over the axes that it is made of. Collective when first asked for."""
    return flatten_mesh(mesh[FLATTENED[name]], name)


def replica_group(mesh: DeviceMesh) -> ProcessGroup:
    """The ranks of `ddp` that hold the same parameters and other tokens. Collective."""
    return _with_row_axes(mesh, "dp_replicate").get_group()


def shard_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh of `fully_shard`: shards, or replicas by shards where there are replicas. Collective.

    Context-parallel ranks hold other tokens of the same rows: parameters are sharded over them too.
    """
    shards = _with_row_axes(mesh, "dp_shard")
    if mesh["dp_replicate"].size() == 1:
        return shards
    if not _divides_rows(mesh):
        return mesh["dp_replicate", "dp_shard"]
    return concatenate_meshes([mesh["dp_replicate"], shards])


def _divides_rows(mesh: DeviceMesh) -> bool:
    return any(mesh[axis].size() > 1 for axis in ROW_AXES)


def _with_row_axes(mesh: DeviceMesh, axis: str) -> DeviceMesh:
    """The dimension `axis`, together with `ROW_AXES` where these have more than one rank."""
    return flattened(mesh, "_".join((axis, *ROW_AXES))) if _divides_rows(mesh) else mesh[axis]


def axis_of_groups(mesh: DeviceMesh) -> dict[str, str]:
    """Name of a process group of this rank -> axis as in `layout.traffic.Traffic`; groups of one rank are left out.

    The groups of several axes (`FLATTENED`) have the name of the first axis with more than one rank: where the data axis has
    one rank, torch has one group for `cp` and both. Collective as `flattened`.
    """
    found: dict[str, str] = {}
    for axis in AXES:
        if mesh[axis].size() > 1:
            found[mesh[axis].get_group().group_name] = axis
    for name, axes in FLATTENED.items() if _divides_rows(mesh) else ():
        first = next(axis for axis in axes if mesh[axis].size() > 1)
        found[flattened(mesh, name).get_group().group_name] = first
    return found


def all_groups(mesh: DeviceMesh) -> dict[str, str]:
    """`axis_of_groups`, and the group of every rank as `all ranks` where no axis has it. Collective as `flattened`."""
    assert dist.group.WORLD is not None, "a mesh needs a default group"
    return {dist.group.WORLD.group_name: "all ranks", **axis_of_groups(mesh)}

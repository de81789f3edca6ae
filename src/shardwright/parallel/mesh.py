"""The only home of device meshes: one mesh per run, its dimensions named as in `layout/axes.py`."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwright.layout.axes import AXES, Axes

FLATTENED = {"dp_shard_cp": ("dp_shard", "cp")}
"""Names of dimensions made of several axes: parameters are sharded over context-parallel ranks too."""


def make_mesh(axes: Axes, device: torch.device) -> DeviceMesh:
    """The mesh of all five axes, outer to inner; axes of size 1 are there too, so that no rank count is special.

    Collective: every rank of the default process group calls it.
    """
    return init_device_mesh(device.type, axes.sizes, mesh_dim_names=AXES)

"""Python objects sent between all ranks of the default group. Collective: every rank calls the function."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def gather_objects(value: Any) -> list[Any]:
    """`value` of each rank, by rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def broadcast_object(value: Any, source: int = 0) -> Any:
    """`value` as rank `source` has it."""
    found = [value]
    dist.broadcast_object_list(found, source)
    return found[0]

"""When the core attention's backward in bf16 is made in float32."""

from __future__ import annotations

from shardwright.backends.facts import backend_facts


def backward_is_wide(device: str, dtype: str, queries: int, width: int) -> bool:
    """Whether attention of so many queries with heads of `width` on a device of this kind has its backward in float32."""
    return backend_facts(device).backward_in_float32(dtype, queries, width)

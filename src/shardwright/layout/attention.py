"""When the core attention's backward in bf16 is made in float32."""

from __future__ import annotations

WIDE_BACKWARD = 2**15
"""Queries times head width up to which a CPU makes it so: its kernel for bf16 takes 1.4 to 7 times as long there
(`benchmarks/document_attention.py --bf16`)."""


def backward_is_wide(device: str, dtype: str, queries: int, width: int) -> bool:
    """Whether attention of so many queries with heads of `width` on a device of this kind has its backward in float32."""
    return device == "cpu" and dtype == "bf16" and queries * width <= WIDE_BACKWARD

"""Unions and differences of spans of time: what covers what."""

from __future__ import annotations

from collections.abc import Iterable

Span = tuple[float, float]
"""(start, end), in any one unit of time."""


def union(spans: Iterable[Span]) -> list[Span]:
    """The same moments as spans that do not touch, in order."""
    joined: list[Span] = []
    for start, end in sorted(span for span in spans if span[1] > span[0]):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def difference(spans: Iterable[Span], covered: Iterable[Span]) -> list[Span]:
    """What of `spans` no span of `covered` covers, as a union."""
    left: list[Span] = []
    covers, at = union(covered), 0
    for start, end in union(spans):
        while at < len(covers) and covers[at][1] <= start:
            at += 1
        here = at
        while here < len(covers) and covers[here][0] < end:
            if covers[here][0] > start:
                left.append((start, covers[here][0]))
            start = max(start, covers[here][1])
            here += 1
        if start < end:
            left.append((start, end))
    return left


def length(spans: Iterable[Span]) -> float:
    """How long the spans are together, moments in several of them counted once."""
    return sum(end - start for start, end in union(spans))

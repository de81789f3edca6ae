"""Packed rows that tests share: where documents lie, from their lengths."""

from __future__ import annotations

import itertools

import torch

from shardwright.attention.packed_rows import PackedRows

CPU = torch.device("cpu")
WIDTH = 12
ROWS = [[3, 5, 1], [12], [], [1, 1, 4, 6]]
"""Lengths of the documents of each row: with padding, whole, of padding alone, full."""


def packed(rows: list[list[int]], width: int = WIDTH) -> PackedRows:
    numbers = torch.full((len(rows), width), -1, dtype=torch.int32)
    for row, lengths in enumerate(rows):
        ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
        for number, (start, end) in enumerate(itertools.pairwise(ends)):
            numbers[row, start:end] = number
    return PackedRows(numbers, CPU)

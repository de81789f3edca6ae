"""Which part of a tensor a rank holds: against torch.chunk, and against DTensor on random meshes. Covers A92."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from shardwright.errors import ShardwrightError
from shardwright.mesh.shard_geometry import Box, box_at, box_of, chunk, from_local, full_tensor, local_tensor, own_part


def parts(shape: tuple[int, ...], placements: list[Any], mesh: tuple[int, ...]) -> list[Tensor]:
    """The parts of all ranks, in the order of their coordinates."""
    whole = torch.arange(math.prod(shape)).view(shape)
    return [whole[box_at(shape, placements, mesh, at).slices] for at in product(*map(range, mesh))]


def test_uneven_small_and_two_dimensional_shards() -> None:
    """A92: by hand."""
    rows = torch.arange(7)
    assert [p.tolist() for p in parts((7,), [Shard(0)], (3,))] == [c.tolist() for c in rows.chunk(3)]
    assert [p.tolist() for p in parts((2,), [Shard(0)], (4,))] == [[0], [1], [], []]
    assert [p.tolist() for p in parts((3,), [Replicate(), Shard(0)], (2, 2))] == [[0, 1], [2]] * 2
    both = [p.tolist() for p in parts((4, 4), [Shard(0), Shard(1)], (2, 2))]
    assert both == [[[0, 1], [4, 5]], [[2, 3], [6, 7]], [[8, 9], [12, 13]], [[10, 11], [14, 15]]]
    assert [p.tolist() for p in parts((8,), [Shard(0), Shard(0)], (2, 2))] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    strided = parts((8,), [_StridedShard(0, split_factor=2), Shard(0)], (2, 2))
    assert [p.tolist() for p in strided] == [[0, 1], [4, 5], [2, 3], [6, 7]]


@st.composite
def placed(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Any], tuple[int, ...]]:
    """(shape, placements, mesh): shards along any dims; or over tensor parallelism to the right, as `fully_shard` makes."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dims = st.integers(0, len(shape) - 1)
    placements = [draw(st.one_of(st.just(Replicate()), dims.map(Shard))) for _ in mesh]
    if len(mesh) == 2 and draw(st.booleans()):
        dim = draw(dims)
        shape = (*shape[:dim], shape[dim] * mesh[1], *shape[dim + 1 :])  # tensor parallelism cuts into equal pieces
        placements = [_StridedShard(dim, split_factor=mesh[1]), Shard(dim)]
    return shape, placements, mesh


@given(placed())
@settings(max_examples=200, deadline=None)
def test_parts_are_those_of_dtensor(case: tuple[tuple[int, ...], list[Any], tuple[int, ...]]) -> None:
    """On every rank: the shape, and where it is not empty the offset. Together the parts are the whole tensor."""
    shape, placements, mesh = case
    seen = torch.zeros(shape, dtype=torch.int64)
    for at in product(*map(range, mesh)):
        box = box_at(shape, placements, mesh, at)
        local, offset = _compute_local_shape_and_global_offset(shape, mesh, list(at), placements)
        assert box.shape == tuple(local)
        assert not box.elements or box.start == tuple(offset)
        seen[box.slices] += 1
    copies = math.prod(size for size, p in zip(mesh, placements) if isinstance(p, Replicate))
    assert torch.equal(seen, torch.full(shape, copies))


@given(st.integers(0, 40), st.integers(1, 9))
def test_chunk_is_that_of_torch(length: int, ranks: int) -> None:
    found = [chunk(length, ranks, rank) for rank in range(ranks)]
    made = [len(piece) for piece in torch.arange(length).chunk(ranks)] if length else []
    assert [rows for _, rows in found] == made + [0] * (ranks - len(made))
    assert all(first == sum(rows for _, rows in found[:rank]) for rank, (first, _) in enumerate(found))


def test_plain_tensors_are_their_own_parts() -> None:
    tensor = torch.arange(6).view(2, 3)
    assert box_of(tensor) == Box((0, 0), (2, 3)) and own_part(tensor, tensor).equal(tensor)
    assert local_tensor(tensor) is full_tensor(tensor) is from_local(tensor, tensor) is tensor
    assert box_of(torch.ones(())) == Box((), ()) and own_part(tensor.sum(), torch.ones(())) == 15


def test_partial_sums_are_refused_by_name() -> None:
    with pytest.raises(ShardwrightError, match=r"norm.weight \(4,\) is placed as .*A partial sum is not the value"):
        box_at((4,), [Partial()], (2,), (0,), "norm.weight")

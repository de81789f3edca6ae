"""Tensors without values that know where each of their elements comes from.

A conversion of weights (experts stacked, projections joined or cut) is run once on such tensors. The result is then read by
parts: for a slice of the result, only the slices of the stored tensors that make it up are read. So a rank that holds some
experts of a layer reads those experts alone. An operation that does more than move elements is computed from whole inputs,
when its result is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from shardwright.torch_private import aten_to_copy, schema, tree_leaves, tree_map_only, wrapper_subclass

Slices = tuple[slice, ...]
"""A part of a tensor: one slice for each dim."""
Read = Callable[[str, Slices, Tensor], None]
"""Fills a tensor with the part of a stored tensor, by the stored tensor's name."""


class Origin:
    """Where the elements of a tensor of `shape` come from."""

    shape: tuple[int, ...]

    def fill(self, box: Slices, out: Tensor, read: Read) -> None:
        """Fills `out` with the part `box`, in the dtype of `out`."""
        raise NotImplementedError

    def stored(self) -> Iterator[str]:
        """Names of the stored tensors that the tensor is made of; a name may come more than once."""
        raise NotImplementedError


@dataclass(frozen=True)
class Stored(Origin):
    """A tensor under its name in the files (or, when it is written, in the model)."""

    name: str
    shape: tuple[int, ...]

    def fill(self, box: Slices, out: Tensor, read: Read) -> None:
        if out.numel():
            read(self.name, box, out)

    def stored(self) -> Iterator[str]:
        yield self.name


@dataclass(frozen=True)
class Joined(Origin):
    """Parts one after the other along `dim`."""

    parts: tuple[Origin, ...]
    dim: int
    shape: tuple[int, ...]

    def fill(self, box: Slices, out: Tensor, read: Read) -> None:
        begin, wanted = 0, box[self.dim]
        for part in self.parts:
            end = begin + part.shape[self.dim]
            start, stop = max(begin, wanted.start), min(end, wanted.stop)
            if start < stop:
                inner = (*box[: self.dim], slice(start - begin, stop - begin), *box[self.dim + 1 :])
                part.fill(inner, out.narrow(self.dim, start - wanted.start, stop - start), read)
            begin = end

    def stored(self) -> Iterator[str]:
        for part in self.parts:
            yield from part.stored()


@dataclass(frozen=True)
class OriginView(Origin):
    """`base` by a view operation. to_base: a part of the view -> the same elements of `base`; reshape: -> their shape there."""

    base: Origin
    shape: tuple[int, ...]
    to_base: Callable[[Slices], Slices]
    reshape: Callable[[Tensor], Tensor] = lambda out: out

    def fill(self, box: Slices, out: Tensor, read: Read) -> None:
        if out.numel():
            self.base.fill(self.to_base(box), self.reshape(out), read)

    def stored(self) -> Iterator[str]:
        return self.base.stored()


@dataclass(frozen=True)
class Computed(Origin):
    """Output `index` of an operation of torch, made from its whole inputs."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int
    shape: tuple[int, ...]

    def fill(self, box: Slices, out: Tensor, read: Read) -> None:
        args, kwargs = tree_map_only(Traced, lambda t: whole(t, out, read), (self.args, self.kwargs))
        kwargs |= {"device": out.device} if "device" in kwargs else {}
        results = self.function(*args, **kwargs)
        out.copy_((results if isinstance(results, (tuple, list)) else [results])[self.index][box])

    def stored(self) -> Iterator[str]:
        for leaf in tree_leaves((self.args, self.kwargs)):
            if isinstance(leaf, Traced):
                yield from leaf.origin.stored()


class Traced(Tensor):
    """A tensor on meta with its `origin`. Operations on it give such tensors; one that writes into it is refused."""

    origin: Origin
    meta: Tensor

    @staticmethod
    def __new__(cls, meta: Tensor, origin: Origin) -> Traced:
        made: Traced = wrapper_subclass(cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=meta.device)
        made.origin, made.meta = origin, meta
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if schema(func).is_mutable:
            raise NotImplementedError(f"{func} writes into a tensor that has no values yet")
        results = func(*tree_map_only(Traced, lambda t: t.meta, args), **kwargs)
        several = isinstance(results, (tuple, list))
        outputs = list(results) if several else [results]
        rule = _RULES.get(func.overloadpacket)
        origins = rule(outputs, *args, **kwargs) if rule is not None else None
        if origins is None:
            origins = [Computed(func, args, kwargs, index, tuple(o.shape)) for index, o in enumerate(outputs)]
        made = [Traced(output, origin) for output, origin in zip(outputs, origins)]
        return made if several else made[0]


def traced(name: str, shape: Sequence[int], dtype: torch.dtype) -> Traced:
    """The stored tensor `name`, to be given to a conversion."""
    return Traced(torch.empty(tuple(shape), dtype=dtype, device="meta"), Stored(name, tuple(shape)))


def whole(tensor: Traced, like: Tensor, read: Read) -> Tensor:
    """All of `tensor` with its values, on the device of `like` and, where both are floating point, in its dtype."""
    floating = tensor.is_floating_point() and like.is_floating_point()
    out = torch.empty(tensor.shape, dtype=like.dtype if floating else tensor.dtype, device=like.device)
    tensor.origin.fill(tuple(slice(0, size) for size in tensor.shape), out, read)
    return out


def _narrowed(base: Origin, dim: int, start: int, output: Tensor) -> Origin:
    """`base` from `start` on along `dim`."""

    def to_base(box: Slices) -> Slices:
        return (*box[:dim], slice(box[dim].start + start, box[dim].stop + start), *box[dim + 1 :])

    return OriginView(base, tuple(output.shape), to_base)


def _without_dim(base: Origin, dim: int, index: int, output: Tensor) -> Origin:
    """Element `index` of `base` along `dim`, without that dim."""
    return OriginView(
        base,
        tuple(output.shape),
        lambda box: (*box[:dim], slice(index, index + 1), *box[dim:]),
        lambda out: out.unsqueeze(dim),
    )


def _with_dim(base: Origin, dim: int) -> Origin:
    """`base` with a dim of size 1 put in at `dim`."""
    shape = (*base.shape[:dim], 1, *base.shape[dim:])
    return OriginView(base, shape, lambda box: (*box[:dim], *box[dim + 1 :]), lambda out: out.squeeze(dim))


def _same(outputs: list[Tensor], tensor: Traced, *args: Any, **kwargs: Any) -> list[Origin] | None:
    return [tensor.origin] if outputs[0].dtype == tensor.dtype else None


def _cat(outputs: list[Tensor], tensors: Sequence[Traced], dim: int = 0) -> list[Origin] | None:
    if not all(isinstance(t, Traced) for t in tensors):
        return None
    shape = tuple(outputs[0].shape)
    return [Joined(tuple(t.origin for t in tensors), dim % len(shape), shape)]


def _stack(outputs: list[Tensor], tensors: Sequence[Traced], dim: int = 0) -> list[Origin] | None:
    if not all(isinstance(t, Traced) for t in tensors):
        return None
    shape = tuple(outputs[0].shape)
    dim = dim % len(shape)
    return [Joined(tuple(_with_dim(t.origin, dim) for t in tensors), dim, shape)]


def _split(outputs: list[Tensor], tensor: Traced, size: Any, dim: int = 0) -> list[Origin]:
    dim = dim % tensor.dim()
    starts = accumulate((output.shape[dim] for output in outputs), initial=0)
    return [_narrowed(tensor.origin, dim, start, output) for start, output in zip(starts, outputs)]


def _slice(
    outputs: list[Tensor], tensor: Traced, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> list[Origin] | None:
    if step != 1:
        return None
    begin = slice(start, end).indices(tensor.shape[dim])[0]
    return [_narrowed(tensor.origin, dim % tensor.dim(), begin, outputs[0])]


def _select(outputs: list[Tensor], tensor: Traced, dim: int, index: int) -> list[Origin]:
    return [_without_dim(tensor.origin, dim % tensor.dim(), index % tensor.shape[dim], outputs[0])]


def _unbind(outputs: list[Tensor], tensor: Traced, dim: int = 0) -> list[Origin]:
    dim = dim % tensor.dim()
    return [_without_dim(tensor.origin, dim, index, output) for index, output in enumerate(outputs)]


def _squeeze(outputs: list[Tensor], tensor: Traced, dim: int | None = None) -> list[Origin] | None:
    if dim is None:
        return None
    return [tensor.origin] if tensor.shape[dim] != 1 else _select(outputs, tensor, dim, 0)


def _transpose(outputs: list[Tensor], tensor: Traced, first: int, second: int) -> list[Origin]:
    first, second = first % tensor.dim(), second % tensor.dim()

    def to_base(box: Slices) -> Slices:
        inner = list(box)
        inner[first], inner[second] = inner[second], inner[first]
        return tuple(inner)

    return [OriginView(tensor.origin, tuple(outputs[0].shape), to_base, lambda out: out.transpose(first, second))]


_ATEN = torch.ops.aten
_RULES: dict[Any, Callable[..., list[Origin] | None]] = {
    _ATEN.cat: _cat,
    _ATEN.stack: _stack,
    _ATEN.split: _split,
    _ATEN.split_with_sizes: _split,
    _ATEN.slice: _slice,
    _ATEN.select: _select,
    _ATEN.unbind: _unbind,
    _ATEN.squeeze: _squeeze,
    _ATEN.transpose: _transpose,
    **dict.fromkeys((_ATEN.clone, _ATEN.alias, _ATEN.detach, aten_to_copy), _same),
}
"""Operations that move elements. A rule gives the origin of each output; None: the output is computed."""

"""First values of parameters and buffers: recorded on meta, replayed one tensor at a time.

`Recorder` notes every operation that creates or writes a meta tensor while a constructor and its
initialisation rules run. `replay` runs the few operations that lead to one tensor again, on the CPU and on
the full shape. So the values follow the model's own rules, whatever they are (`reset_parameters`,
`_init_weights`, `nn.Parameter(torch.randn(...))`), and nothing but the asked tensor is ever held. Each
random operation is seeded from (seed, name of the tensor it belongs to), so a value depends on nothing
else: not on the layout, the rank, or what was drawn before.

The idea of replaying recorded constructors is that of torchdistX's deferred initialisation.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardwright.models.hub_names import HubNames
from shardwright.torch_private import (
    TorchDispatchMode,
    refresh_device_constructors,
    schema,
    storage_id,
    tree_leaves,
    tree_map_only,
)

META = torch.device("meta")

_ALLOCATE = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}
_OVERWRITE = {"aten::normal_", "aten::uniform_", "aten::fill_", "aten::zero_", "aten::copy_", "aten::random_"}
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_INIT_FUNCTIONS = dict(vars(torch.nn.init))  # as they are now: Transformers replaces them while it builds
_FROM_VALUES = {torch.tensor, torch.as_tensor, torch.asarray}


@dataclass(frozen=True)
class StorageView:
    """A tensor as a view of a storage: what is needed to make the same view of a real storage."""

    storage: int
    storage_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(eq=False)
class Operation:
    """One recorded call. `after` are the operations that made what it reads or writes into."""

    index: int
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    after: tuple[Operation, ...]
    allocates: bool = False  # makes memory and leaves it as it is
    is_random: bool = False
    # one per tensor that the call returns; None where it is no new storage
    outputs: tuple[StorageView | None, ...] = ()
    # of a random operation: the tensor that it belongs to, and a running number in it
    owner: tuple[str, int] | None = None


@dataclass(frozen=True, eq=False)
class Recipe:
    """The operations that give one tensor its first value, and the names of the tensor in the whole model.

    names: its fully qualified names, more than one where weights are tied. The first one seeds it.
    """

    names: tuple[str, ...]
    view: StorageView
    last: tuple[Operation, ...]
    whole: UnsplitModel

    def __deepcopy__(self, memo: dict[int, Any]) -> Recipe:
        return self

    @property
    def is_set(self) -> bool:
        """False where nothing ever wrote a value: the constructor allocates the tensor and leaves it."""
        return any(not operation.allocates for operation in self.last)


@dataclass(frozen=True, eq=False)
class UnsplitModel:
    """What each recipe knows of the unsplit model. groups: names of each parameter and persistent buffer."""

    groups: tuple[tuple[str, ...], ...]
    hub: HubNames | None = None  # of a Transformers model: what files call its tensors
    ignored: tuple[str, ...] = ()  # patterns of names in files that old versions wrote and nobody needs
    optional: tuple[str, ...] = ()  # patterns of names that files may lack
    beside: tuple[str, ...] = ()  # parameters that text does not reach

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(name for group in self.groups for name in group)

    @cached_property
    def modules(self) -> frozenset[str]:
        """Every module that holds one of the tensors, at any depth."""
        return frozenset(module for name in self.names for module in modules_above(name))


def modules_above(name: str) -> Iterator[str]:
    """Names of the modules that a tensor stands in, from the innermost out."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


class _Values(TorchFunctionMode):
    """Notes what meta tensors hide from the recorder.

    `torch.tensor(values)` forgets the values: they are noted as a copy from a real tensor. Functions of
    `torch.nn.init` whose steps depend on values (`trunc_normal_`, `orthogonal_`) ask `tensor.is_meta` and
    then do nothing: at that question the whole call is noted.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == _IS_META:
            asking = sys._getframe(1)
            if asking.f_globals is vars(torch.nn.init) and func(*args):
                code = asking.f_code
                names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
                given = {name: asking.f_locals[name] for name in names}
                self._recorder.note_call(_INIT_FUNCTIONS[code.co_name], given)
            return func(*args, **kwargs)
        if func not in _FROM_VALUES or torch.device(kwargs.get("device") or META).type != "meta":
            return func(*args, **kwargs)
        if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves(args)):
            return func(*args, **kwargs)
        requires_grad = bool(kwargs.get("requires_grad", False))
        real = func(*args, **{**kwargs, "device": "cpu"} | ({"requires_grad": False} if requires_grad else {}))
        noted = torch.empty(real.shape, dtype=real.dtype, device=META)
        noted.copy_(real.detach())
        return noted.requires_grad_(requires_grad)


class Recorder(TorchDispatchMode):
    """Inside it and its meta device, every tensor's history is kept; `last(tensor)` gives its end."""

    def __init__(self) -> None:
        super().__init__()
        self._history: dict[int, tuple[Operation, ...]] = {}
        self._alive: dict[int, Tensor] = {}  # a storage that is freed could give its identity to another
        self._count = 0
        self._contexts: list[Any] = []

    def __enter__(self) -> Recorder:
        refresh_device_constructors()
        self._contexts = [torch.device("meta"), _Values(self)]
        for context in self._contexts:
            context.__enter__()
        torch.empty(0)  # looks the constructors up, before Transformers replaces one of them
        super().__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        for context in reversed(self._contexts):
            context.__exit__(*details)

    def last(self, tensor: Tensor) -> tuple[Operation, ...]:
        """The operations that wrote `tensor`'s storage, oldest first, without those that were overwritten."""
        return self._history.get(storage_id(tensor), ())

    def note_call(self, function: Any, given: dict[str, Any]) -> None:
        """Notes a call of a function of `torch.nn.init` that gives all of `given["tensor"]` new values."""
        tensor = given["tensor"]
        after = () if _fills_storage(tensor) else self.last(tensor)
        views = tree_map_only(Tensor, _captured, given)
        operation = Operation(self._count, function, (), views, after, is_random=True)
        self._count += 1
        self._history[storage_id(tensor)] = (*after, operation)
        self._alive.setdefault(storage_id(tensor), tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = {storage_id(tensor) for tensor in inputs if tensor.is_meta}
        written = [tensor for tensor in _written(func, args, kwargs) if tensor.is_meta]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        new = [o.is_meta and storage_id(o) not in known and storage_id(o) not in self._history for o in outputs]
        if written or any(new):
            self._note(func, args, kwargs, inputs, written, [o if n else None for o, n in zip(outputs, new)])
        return result

    def _note(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        inputs: list[Tensor],
        written: list[Tensor],
        created: list[Tensor | None],
    ) -> None:
        name = schema(func).name
        overwrites = len(written) == 1 and name in _OVERWRITE and _fills_storage(written[0])
        read = inputs[1:] if overwrites else inputs  # what it overwrites need not be made first
        after = tuple(dict.fromkeys(operation for tensor in read for operation in self.last(tensor)))
        args, kwargs = tree_map_only(Tensor, _captured, (args, kwargs))
        if torch.device(kwargs.get("device") or "cpu").type == "meta":
            kwargs["device"] = torch.device("cpu")
        operation = Operation(
            self._count,
            func,
            args,
            kwargs,
            after,
            allocates=name in _ALLOCATE,
            is_random=torch.Tag.nondeterministic_seeded in func.tags,
            outputs=tuple(None if tensor is None else view_of(tensor) for tensor in created),
        )
        self._count += 1
        for tensor in written:
            history = () if overwrites else self.last(tensor)
            self._history[storage_id(tensor)] = (*history, operation)
            self._alive.setdefault(storage_id(tensor), tensor)
        for output in created:
            if output is not None:
                self._history[storage_id(output)] = (operation,)
                self._alive[storage_id(output)] = output


def assign_owners(recipes: Iterable[Recipe]) -> None:
    """Gives each random operation to the first tensor that needs it: a copy made of it draws the same."""
    for recipe in recipes:
        number = 0
        for operation in _ordered(recipe.last):
            if operation.is_random and operation.owner is None:
                operation.owner = (recipe.names[0], number)
                number += 1


def replay(recipe: Recipe, seed: int, unset: float = float("nan")) -> Tensor:
    """The full value of one tensor on the CPU, in the dtype in which the model was recorded.

    What was allocated and never written reads `unset`. The state of torch's own generator is left as it was.
    """
    storages: dict[int, torch.UntypedStorage] = {}

    def real(view: StorageView) -> Tensor:
        if view.storage not in storages:
            storages[view.storage] = torch.UntypedStorage(view.storage_bytes)
        return torch.empty(0, dtype=view.dtype).set_(storages[view.storage], view.offset, view.shape, view.stride)

    state = torch.get_rng_state()
    try:
        with torch.no_grad():
            for operation in _ordered(recipe.last):
                _run(operation, seed, storages, real, unset)
            return real(recipe.view)
    finally:
        torch.set_rng_state(state)


def _run(operation: Operation, seed: int, storages: dict[int, torch.UntypedStorage], real: Any, unset: float) -> None:
    if operation.owner is not None:
        torch.default_generator.manual_seed(seed_of(seed, *operation.owner))
    args, kwargs = tree_map_only(StorageView, real, (operation.args, operation.kwargs))
    result = operation.function(*args, **kwargs)
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    for view, tensor in zip(operation.outputs, tensors):
        if view is None:
            continue
        if tensor.stride() != view.stride or tensor.storage_offset() != view.offset:
            tensor = torch.empty_strided(view.shape, view.stride, dtype=view.dtype).copy_(tensor)
        if operation.allocates:
            tensor.fill_(unset if tensor.is_floating_point() else 0)
        storages[view.storage] = tensor.untyped_storage()


def seed_of(seed: int, name: str, number: int = 0) -> int:
    """A 63-bit seed from (seed, name): the same on every rank, machine and version of Python."""
    digest = hashlib.sha256(f"{seed}/{name}/{number}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def seed_generators(value: int) -> None:
    """Seeds the generator of the CPU and those of the GPUs in use.

    `torch.manual_seed` also queues a call for devices that nothing has used yet, with a formatted stack for each: 1.5 ms.
    """
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value)


def _ordered(last: tuple[Operation, ...]) -> list[Operation]:
    """All operations that `last` rests on, and `last` itself, in the order in which they were recorded."""
    seen: dict[int, Operation] = {}
    todo = list(last)
    while todo:
        operation = todo.pop()
        if operation.index not in seen:
            seen[operation.index] = operation
            todo.extend(operation.after)
    return [seen[index] for index in sorted(seen)]


def view_of(tensor: Tensor) -> StorageView:
    """`tensor` as a view of its storage."""
    return StorageView(
        storage_id(tensor),
        tensor.untyped_storage().nbytes(),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        int(tensor.storage_offset()),
        tensor.dtype,
    )


def _captured(tensor: Tensor) -> StorageView | Tensor:
    """A meta tensor as a view to be made real later; a real one by its value now."""
    return view_of(tensor) if tensor.is_meta else tensor.detach().clone()


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that the schema says the call writes into."""
    given = [*zip(schema(func).arguments, args)]
    given += [(argument, kwargs[argument.name]) for argument in schema(func).arguments if argument.name in kwargs]
    values = [value for argument, value in given if argument.alias_info is not None and argument.alias_info.is_write]
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _fills_storage(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()

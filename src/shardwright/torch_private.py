"""Every private name of torch that Shardwright uses: nothing else in the package may use one (tests/unit/suite).

Each name stands here with the reason why there is no public way. To try a new version of torch, import this module, then run
the suite. Tried on torch 2.13.0 (CPU build, the whole suite) and on 2.14.1 (CUDA build; models, attention, loss and
`tests/gloo/backends`). Where an older version differs, the entry says how.

`torch._foreach_*` is not listed: torch documents these functions. What torch names for others to override, such as
`ParallelStyle._apply`, is overridden here once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _distributed_c10d as _c10d
from torch._C._distributed_c10d import HashStore as HashStore  # torch.distributed has them, unknown to type checkers
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch._library.custom_ops import CustomOpDef
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.parallel import ParallelStyle as _ParallelStyle
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import register_pytree_node as register_pytree_node
from torch.utils._pytree import tree_iter as tree_iter
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only

# Dispatch: torch documents TorchDispatchMode and pytree in its notes, and gives them no public module.

aten_to_copy = torch.ops.aten._to_copy
"""What `Tensor.to` becomes where torch dispatches."""

current_backward = torch._C._current_graph_task_id
"""The number of the backward pass that runs on this thread, -1 outside of one. Saved-tensor hooks do not tell it."""

wrapper_subclass: Any = torch.Tensor._make_wrapper_subclass
"""Makes a tensor subclass without memory, as torch's own documentation of subclasses does."""


def schema(operator: Any) -> Any:
    """The schema of an operator, which says what it writes into."""
    return operator._schema


def storage_id(tensor_or_storage: Any) -> int:
    """A number that tensors share which share memory. `data_ptr` is 0 on meta and for what `fully_shard` has emptied."""
    storage = tensor_or_storage
    return (storage.untyped_storage() if isinstance(storage, Tensor) else storage)._cdata


def view_base(tensor: Tensor) -> Tensor | None:
    """The tensor that `tensor` is a view of, as autograd knows it; None where it is no view."""
    return tensor._base


def assert_async(condition: Tensor, message: str) -> None:
    """Raises on the CPU, and stops the kernel queue on a GPU: a plain test would wait for the GPU."""
    torch._assert_async(condition, message)


unsafe_view = torch.ops.aten._unsafe_view
"""A view that autograd takes for a tensor of its own: `fully_shard` warns of views among the outputs of a module."""


def is_view(tensor: Tensor) -> bool:
    """Whether autograd knows `tensor` as a view, which may not be detached in place (zero-bubble schedules do that)."""
    return tensor._is_view()


def refresh_device_constructors() -> None:
    """Makes `with torch.device(…)` look up anew which functions take a default device.

    torch keeps that set from its first use in the process. Transformers replaces `torch.linspace` while it builds a model, so
    a process that used the set there for the first time would make every later `torch.linspace` on the CPU.
    """
    _device_constructors.cache_clear()


# Operators of our own: what torch.compile calls without looking inside, and what selective recomputation can keep.

OWN_NAMESPACE = "shardwright"
"""Where our own operators stand among torch's operators."""
OWN_OPERATORS: dict[Any, Callable[..., Any]] = {}
"""The function of each. A mode that calls the operator does not see what it does inside; if it calls the function, it does."""


def own_operator(function: Callable[..., Any]) -> CustomOpDef:
    """`function`, which changes none of its arguments and returns new tensors, as an operator of torch of the same name.

    torch.library.custom_op is public, the class of its result is not.
    """
    operator = torch.library.custom_op(f"{OWN_NAMESPACE}::{function.__name__}", mutates_args=())(function)
    OWN_OPERATORS[operator._opoverload] = function
    return operator


def overload(operator: CustomOpDef) -> Any:
    """What an operator of our own is where torch dispatches."""
    return operator._opoverload


# Attention: the kernels behind scaled_dot_product_attention, which does not return the log-sum-exp.

flash_attention_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_attention_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
flash_attention_cuda = torch.ops.aten._scaled_dot_product_flash_attention
flash_attention_cuda_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
flash_attention_by_lengths = torch.ops.aten._flash_attention_forward
"""Takes documents by their lengths. `torch.nn.attention.varlen` has no dropout."""
flash_attention_by_lengths_backward = torch.ops.aten._flash_attention_backward

ATTENTION_OPERATORS: tuple[Any, ...] = tuple(
    getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default
    for name in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
)
"""What scaled_dot_product_attention calls: selective recomputation keeps their results."""

MATRIX_PRODUCTS: frozenset[Any] = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm")
    if hasattr(torch.ops.aten, name)
)
"""What matrix products become where torch dispatches; the last two are of torch 2.8 and later."""

# Modules: named_parameters leaves out a parameter that is None, and its dictionary cannot be written to.


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters of `module` itself, to read and to replace. A property of the same name does not hide them."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The buffers of `module` itself."""
    return module._buffers


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """The children of `module`, to read and to replace."""
    return module._modules


def drop_tensors(module: nn.Module) -> None:
    """Takes all parameters and buffers out of `module`, which can't run afterwards."""
    for one in module.modules():
        one._parameters.clear()
        one._buffers.clear()


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers of `module` itself that its state dict holds."""
    hidden = module._non_persistent_buffers_set
    return {name: b for name, b in module._buffers.items() if b is not None and name not in hidden}


def copy_module(
    module: nn.Module,
    buffers: Mapping[str, Tensor | None] | None = None,
    modules: Mapping[str, nn.Module | None] | None = None,
) -> Any:
    """A copy that shares parameters and hooks with `module`, and has `buffers` and `modules` of its own where given."""
    copied = copy.copy(module)
    if buffers is not None:
        copied._buffers = dict(buffers)
    if modules is not None:
        copied._modules = dict(modules)
    return copied


# Process groups and meshes

collectives = torch.ops._c10d_functional
"""Functional collectives, which torch.compile traces; `torch.distributed.nn.functional` is not traced."""
COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""Where collectives stand among torch's operators."""
REDISTRIBUTE_LOGGER = "torch.distributed.tensor._redistribute"
"""The logger that warns of a DTensor made whole in two gathers."""


def group_of(name: str) -> dist.ProcessGroup:
    """The process group called `name`. Raises where there is none any more."""
    return _c10d._resolve_process_group(name)  # type: ignore[arg-type]


def group_in_operator(arguments: Iterable[Any]) -> dist.ProcessGroup:
    """The group that an operator of `COLLECTIVE_NAMESPACES` is called with: boxed, or the last text is its name."""
    arguments = list(arguments)
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return dist.ProcessGroup.unbox(argument)
    return group_of(next(argument for argument in reversed(arguments) if isinstance(argument, str)))


def second_store() -> Store:
    """A connection of its own to the store in which the ranks have met, for a thread beside the main one."""
    store: Any = _get_default_store()
    return store.clone()


def flight_recorders() -> list[str]:
    """What torch's flight recorders hold, as JSON: gloo and NCCL have one each, a build without one has no such name."""
    dumps = (getattr(_c10d, f"_dump_{name}_trace_json", None) for name in ("fr", "nccl"))
    return [dump(True, False) for dump in dumps if dump is not None]


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """One dimension `name` over all dimensions of `mesh`. Collective when first asked for."""
    return mesh._flatten(name)


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """A mesh with the dimensions of `meshes`, which are parts of one."""
    return DeviceMesh._concatenate(meshes)


# DTensor


FAKE = "fake"
"""A backend for groups of one rank, whose collectives copy inputs to outputs without a communicator."""


def has_fake_backend() -> bool:
    """Whether torch has the backend `fake` without an import of its testing package: from 2.13 on."""
    return FAKE in dist.Backend.backend_list


def place_like(local: Tensor, like: DTensor) -> DTensor:
    """`local` as a DTensor placed like `like`, on the device where `local` is and without a graph.

    `DTensor.from_local` moves the local tensor to the device of the mesh, also where `fully_shard` keeps shards on the host.
    """
    meta = TensorMeta(like.shape, like.stride(), local.dtype)
    return DTensor(local, DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta), requires_grad=False)


def is_strided(placement: Any) -> bool:
    """Whether `fully_shard` has cut a tensor that tensor parallelism to its right has cut already."""
    return isinstance(placement, _StridedShard)


class ParallelStyle(_ParallelStyle):
    """A style for `parallelize_module`, which changes a module in `apply`; torch calls that method `_apply`."""

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Changes `module` and returns it."""
        raise NotImplementedError

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self.apply(module, device_mesh)


# fully_shard


def fsdp_units(modules: Iterable[Any]) -> list[tuple[FSDPModule, Any]]:
    """(module, parameter group that `fully_shard` gathers together) in the order of `modules`, each group once.

    torch 2.13 has a list of groups for each module, older versions one group or None. Of a unit are used: `fsdp_params`,
    `unshard_async_op`, `mesh_info.replicate_process_group`; of a parameter in it: `sharded_param`, `offload_to_cpu`,
    `reset_sharded_param`.
    """
    units: dict[int, tuple[FSDPModule, Any]] = {}
    for module in modules:
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            found = [state._fsdp_param_group] if groups is None else groups
            for group in found:
                if group is not None:
                    units.setdefault(id(group), (module, group))
    return list(units.values())


def end_fully_shard(modules: Sequence[FSDPModule]) -> None:
    """Takes the state of `fully_shard` out of these modules, which can't run afterwards.

    The state holds shards, gathered parameters and buffers, and no public function of torch (up to 2.14) takes it away.
    """
    for _, group in fsdp_units(modules):
        for parameter in group.fsdp_params:
            vars(parameter).clear()
        vars(group).clear()
    for module in modules:
        state = module._get_fsdp_state()
        if vars(state):  # modules that are gathered together share one state
            for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
                handle.remove()
            vars(state).clear()

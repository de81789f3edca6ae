"""Private names of torch stand in `torch_private.py` alone, so that a new version of torch is tried in one place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

import shardwright

SOURCE = Path(shardwright.__file__).parent
HOME = SOURCE / "torch_private.py"
OBJECTS = (
    torch,
    dist,
    dist.distributed_c10d,
    nn.Module(),
    torch.Tensor,
    torch.UntypedStorage,
    torch.Generator,
    torch.autograd.Function,
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))]),
    DTensor,
    DeviceMesh,
    FSDPModule,
    PipelineStage,
    dist.ProcessGroup,
    torch.ops.aten.mm.default,
)
DYNAMIC = ("_fsdp_param_group", "_fsdp_param_groups", "_c10d_functional", "_spec")
"""Names that `dir` does not show."""


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


NAMES = {name for thing in OBJECTS for name in dir(thing) if private(name)} | {*DYNAMIC}


def private_uses(source: str) -> Iterator[str]:
    """Private names of torch that `source` imports, or reads of something other than `self`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (
                a.name for a in node.names if a.name.startswith("torch.") and any(map(private, a.name.split(".")))
            )
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if any(map(private, name.split("."))):
                    yield name
        elif isinstance(node, ast.Attribute) and private(node.attr):
            text = ast.unparse(node)
            of_torch = text.startswith(("torch.", "dist.", "nn."))
            if of_torch or (node.attr in NAMES and ast.unparse(node.value) not in ("self", "cls")):
                yield text


def is_documented(name: str) -> bool:
    """torch documents its functions over lists of tensors under these names."""
    return name.startswith("torch._foreach_")


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch._C._distributed_c10d as c10d", ["torch._C._distributed_c10d"]),
        ("from torch.utils._pytree import tree_leaves", ["torch.utils._pytree.tree_leaves"]),
        ("from torch._C import Generator", ["torch._C.Generator"]),
        ("torch.ops.aten._to_copy(x)", ["torch.ops.aten._to_copy"]),
        ("module._parameters['weight']", ["module._parameters"]),
        ("mesh['cp']._flatten('both')", ["mesh['cp']._flatten"]),
        ("state._fsdp_param_group", ["state._fsdp_param_group"]),
        ("super()._apply(module)", ["super()._apply"]),
        ("self._parameters = []\nown._count = 1\nx.__dict__", []),
        ("from transformers.models._auto import x", []),
    ],
)
def test_what_counts_as_private(source: str, found: list[str]) -> None:
    assert list(private_uses(source)) == found


def test_no_private_name_of_torch_outside_its_module() -> None:
    found = {
        f"{path.relative_to(SOURCE)}: {name}"
        for path in SOURCE.rglob("*.py")
        if path != HOME
        for name in private_uses(path.read_text(encoding="utf-8"))
        if not is_documented(name)
    }
    assert not found

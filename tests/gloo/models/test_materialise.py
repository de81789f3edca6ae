"""Sharded models get the values of the whole: covers A27, A28, A29, A35, A36, A92, A133.

The oracle for weights is Transformers' from_pretrained, for random values the model on one rank (whose
distribution tests/unit/models/test_initialization.py checks), for training a plain loop on a full copy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests import tolerance
from tests.gloo.ranks import run_ranks
from tests.tiny_models import FAMILIES, spec_of, write_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM

from shardwright.config.schema import Model
from shardwright.models import build_model, find_parts, materialise
from shardwright.torch_private import fsdp_units

pytestmark = [pytest.mark.gloo, pytest.mark.slow]
CPU = torch.device("cpu")
Names = tuple[str, ...]


def shard(model: nn.Module, mesh: Any) -> nn.Module:
    """Blocks one by one, the rest at the root: what may be tied is in one group."""
    ignored = {p for p in model.parameters() if p.ndim == 0}
    for name in find_parts(model).blocks:
        fully_shard(model.get_submodule(name), mesh=mesh, ignored_params=ignored)
    return fully_shard(model, mesh=mesh, ignored_params=ignored)


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(p).detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}


def two_steps(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        logits = model(ids)
        logits = logits if isinstance(logits, Tensor) else logits.logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return values(model)


def close(got: dict[str, Tensor], want: dict[str, Tensor], tokens: int) -> None:
    assert got.keys() == want.keys()
    bound = tolerance.moved(want, tokens)
    for name, value in want.items():
        difference = (got[name] - value).abs().max()
        assert difference <= bound * value.abs().max(), f"{name}: {difference}"


def tie_groups(model: nn.Module) -> set[Names]:
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return {tuple(names) for names in groups.values() if len(names) > 1}


# weights, every family, 2 ranks


def _pretrained(root: str, families: Names) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for family in families:
        spec = spec_of(Path(root) / family, family)
        want = AutoModelForCausalLM.from_pretrained(spec.model_name_or_path, dtype=torch.float32)
        model = build_model(spec, torch.float32)
        ties = tie_groups(model)
        shard(model, mesh)
        materialise(model, spec, seed=0, device=CPU)
        assert tie_groups(model) == ties == tie_groups(want)
        for name, value in want.named_parameters(remove_duplicate=False):
            got = model.get_parameter(name)
            assert isinstance(got, DTensor) and torch.equal(got.full_tensor(), value), f"{family}: {name}"
        rows = model.get_input_embeddings().weight.to_local().shape[0]
        assert rows == (2049 if dist.get_rank() == 0 else 2048)
        buffers = dict(model.named_buffers())
        for name, value in want.named_buffers():
            assert torch.equal(buffers[name], value) and buffers[name].dtype == value.dtype, f"{family}: {name}"


def test_weights_of_every_family_are_those_of_from_pretrained_on_two_ranks(tmp_path: Path) -> None:
    """A29, A133: bit for bit, ties kept, 4097 rows on two ranks, buffers as in a normal build."""
    for family in FAMILIES:
        write_model(tmp_path / family, family)
    run_ranks(_pretrained, 2, str(tmp_path), tuple(FAMILIES))


# training after it


def _trains(root: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for family in ("llama_tied", "gpt2"):
        spec = spec_of(Path(root) / family, family, init="random")
        reference = build_model(spec, torch.float64).eval()
        materialise(reference, spec, seed=5, device=CPU)
        torch.manual_seed(100 + dist.get_rank())
        model = shard(build_model(spec, torch.float64).eval(), mesh)
        materialise(model, spec, seed=5, device=CPU)
        for module in model.modules():  # before the first forward, too, fully_shard knows what the modules hold
            if isinstance(module, FSDPModule):
                module.reshard()
                held = {id(p) for p in module.parameters()}
                assert {
                    id(p.sharded_param) for _, unit in fsdp_units(module.modules()) for p in unit.fsdp_params
                } <= held
        close(values(model), values(reference), 1)
        ids = torch.arange(24).view(2, 12) * 7
        close(two_steps(model, ids), two_steps(reference, ids), ids.numel())
        assert len(tie_groups(model)) == 1


def test_two_steps_of_a_tied_sharded_model_equal_those_of_a_full_copy(tmp_path: Path) -> None:
    """A29, A36: ranks with other seeds start from the same model; fully_shard trains the new tensors."""
    for family in ("llama_tied", "gpt2"):
        write_model(tmp_path / family, family)
    run_ranks(_trains, 2, str(tmp_path))


# a plain module with awkward parameters


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width, bias=False)
        self.transposed = nn.Parameter(torch.randn(5, width).t())  # not contiguous
        self.gain = nn.Parameter(torch.ones(1))  # smaller than the number of ranks
        self.scale = nn.Parameter(torch.tensor(0.75))  # no dims

    def forward(self, x: Tensor) -> Tensor:
        mixed = x + self.down(torch.tanh(self.up(x))) * self.gain
        return mixed + (x @ self.transposed).sum(-1, keepdim=True) * self.scale


class Awkward(nn.Module):
    def __init__(self, width: int = 8, vocabulary: int = 13) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("bias", torch.linspace(-1, 1, vocabulary), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x) + self.bias


AWKWARD = Model(model_name_or_path=f"{__name__}:Awkward", init="random")


def _awkward(replicas: int) -> dict[str, Tensor]:
    shape, dims = ((replicas, dist.get_world_size() // replicas), ("dp_replicate", "dp_shard"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=dims) if replicas > 1 else init_device_mesh("cpu", shape[1:])
    reference = build_model(AWKWARD, torch.float64)
    materialise(reference, AWKWARD, seed=1, device=CPU)
    torch.manual_seed(dist.get_rank())
    model = shard(build_model(AWKWARD, torch.float64), mesh)
    materialise(model, AWKWARD, seed=1, device=CPU)
    start = values(model)
    close(start, values(reference), 1)
    assert not isinstance(model.blocks[0].scale, DTensor) and model.blocks[0].scale.item() == 0.75
    assert torch.equal(model.bias, torch.linspace(-1, 1, 13))
    ids = torch.arange(12).view(2, 6)
    close(two_steps(model, ids), two_steps(reference, ids), ids.numel())
    return start


@pytest.mark.parametrize(("world_size", "replicas"), [(1, 1), (2, 1), (3, 1), (4, 2)])
def test_awkward_parameters_start_and_train_alike_on_every_layout(world_size: int, replicas: int) -> None:
    """A27, A28, A35, A36: 0-dim, size 1, transposed and tied parameters on 1, 2, 3 and 2 x 2 ranks."""
    starts = run_ranks(_awkward, world_size, replicas)
    alone = build_model(AWKWARD, torch.float64)
    materialise(alone, AWKWARD, seed=1, device=CPU)
    for start in starts:
        for name, value in values(alone).items():
            assert torch.equal(start[name], value), name


# tensor parallel below fully_shard


def _two_dims(root: str, init: str) -> None:
    spec = spec_of(Path(root) / "llama", "llama", init=init)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    whole = build_model(spec, torch.float32)
    materialise(whole, spec, seed=9, device=CPU)
    model = build_model(spec, torch.float32)
    plan = {
        "model.layers.*.self_attn.q_proj": ColwiseParallel(),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(),
        "model.layers.*.mlp.up_proj": ColwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(),
    }
    parallelize_module(model, mesh["tp"], plan)
    shard(model, mesh["dp_shard"])
    materialise(model, spec, seed=9, device=CPU)
    place = mesh.get_coordinate()
    for name, value in whole.named_parameters():
        got = model.get_parameter(name).to_local()
        # what fully_shard does, said again: tensor parallelism cuts first, then the rows go to the dp ranks
        part = value
        if name.endswith(("q_proj.weight", "up_proj.weight")):
            part = part.chunk(2, 0)[place[1]]
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            part = part.chunk(2, 1)[place[1]]
        rows = part.split(-(-part.shape[0] // 2), 0)
        assert torch.equal(got, rows[place[0]]), name


@pytest.mark.parametrize("init", ["random", "pretrained"])
def test_parts_under_tensor_parallelism_and_fully_shard(tmp_path: Path, init: str) -> None:
    """A92: strided shards hold the rows of the one full draw, and those of the file."""
    write_model(tmp_path / "llama", "llama")
    run_ranks(_two_dims, 4, str(tmp_path), init)

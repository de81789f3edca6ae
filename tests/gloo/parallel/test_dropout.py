"""Dropout where the model or its rows are split: which masks are equal and which differ between ranks. Covers A91, A131.

GPT-2 drops on embeddings, residual stream and attention; every rank computes its attention whole. Llama's heads are divided.
"""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.gloo.engine import GPT2, LLAMA, SMALL, batches_for, make_engine, run_file
from tests.gloo.ranks import run_ranks
from torch import Tensor, nn

from shardwright.config.load import Loaded
from shardwright.train.update import UpdateEngine

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

LENGTH, P = 12, {"resid_pdrop": 0.3, "embd_pdrop": 0.2, "attn_pdrop": 0.4}
BLOCK = "transformer.h.1"
RESIDUAL = (f"{BLOCK}.attn.resid_dropout", f"{BLOCK}.mlp.dropout")


def case(model: str = GPT2, **options: Any) -> Loaded:
    drops = P if model == GPT2 else {"attention_dropout": 0.4}
    if "parallelism__cp_size" in options:
        drops = {**P, "attn_pdrop": 0.0}
    values: dict[str, Any] = {
        "model__config_overrides": {**SMALL[model], **drops},
        "data__max_length": LENGTH,
        "training__per_device_train_batch_size": 4,
        "parallelism__data_parallel": "ddp",
    }
    return run_file(model, **{**values, **options})


TP = {"parallelism__tp_size": 2}
CASES = {
    "sequence": case(**TP),
    "sequence, recomputed": case(**TP, memory__activation_checkpointing="full"),
    "whole": case(**TP, parallelism__sequence_parallel=False),
    "heads": case(LLAMA, **TP),
    "heads, whole": case(LLAMA, **TP, parallelism__sequence_parallel=False),
    "context": case(parallelism__cp_size=2),
}


def _watch(engine: UpdateEngine, masks: dict[str, list[Tensor]], states: list[str]) -> list[Any]:
    """Hooks that keep the mask of every `nn.Dropout`, and the generator's state in front of attention's output projection."""
    handles = []

    def mask(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            masks.setdefault(name, []).append(output.detach() != 0)

        return hook

    def state(module: nn.Module, args: Any) -> None:
        states.append(hashlib.sha1(torch.get_rng_state().numpy().tobytes()).hexdigest())

    for name, module in engine.module.named_modules():
        if isinstance(module, nn.Dropout):
            handles.append(module.register_forward_hook(mask(name)))
        if name.endswith(("attn.c_proj", "self_attn.o_proj")):
            handles.append(module.register_forward_pre_hook(state))
    return handles


def _facts(cases: dict[str, Loaded]) -> dict[str, Any]:
    found = {}
    for name, loaded in cases.items():
        engine = make_engine(loaded)
        masks: dict[str, list[Tensor]] = {}
        states: list[str] = []
        gradients = []
        for attempt in range(2):
            handles = _watch(engine, masks, states) if attempt == 0 else []
            engine.forward_backward(batches_for(engine, 1, length=LENGTH))
            for handle in handles:
                handle.remove()
            gradients.append({local.name: gradient.clone() for local, gradient in engine.gradients()})
            engine.zero_grad()
            torch.rand(1 + dist.get_rank())  # what a loader on one rank would draw
        whole = [n for n, p in engine.module.named_parameters() if p.shape == gradients[0][n].shape]
        found[name] = {"masks": masks, "states": states, "gradients": gradients, "whole": whole}
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(_facts, 2, CASES)


def _same(name: str, module: str, ranks: list[dict[str, Any]]) -> bool:
    first, second = (rank[name]["masks"][module] for rank in ranks)
    assert len(first) == len(second) > 0
    return all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.parametrize("name", [name for name in CASES if name != "context"])
def test_gradients_of_whole_parameters_are_those_of_all_ranks(name: str, ranks: list[dict[str, Any]]) -> None:
    """A91: bit for bit, norms, biases and position table among them."""
    first, second = (rank[name]["gradients"][0] for rank in ranks)
    whole = ranks[0][name]["whole"]
    assert len(whole) >= 7
    assert [n for n in whole if not torch.equal(first[n], second[n])] == []


def test_masks_on_pieces_differ_and_on_whole_tensors_do_not(ranks: list[dict[str, Any]]) -> None:
    """A91: with sequence parallelism ranks hold other positions of the residual stream, without it the same ones."""
    for name in ("sequence", "whole", "context"):
        assert _same(name, "transformer.drop", ranks) == (name != "context"), name
        for module in RESIDUAL:
            assert _same(name, module, ranks) == (name == "whole"), (name, module)


def test_attention_masks_follow_the_heads(ranks: list[dict[str, Any]]) -> None:
    """A91: attention that every rank computes alike drops alike; on heads of its own a rank draws its own numbers."""
    for name in ("sequence", "whole", "heads", "heads, whole"):
        first, second = (rank[name]["states"] for rank in ranks)
        assert len(first) == len(second) > 0
        equal = [a == b for a, b in zip(first, second)]
        assert all(equal) if "heads" not in name else not any(equal), name


def test_keep_rates(ranks: list[dict[str, Any]]) -> None:
    """Of n elements 1 - p are kept, within 4 standard deviations; two modules on one rank draw apart."""
    for name in ("sequence", "whole", "context"):
        for rank in ranks:
            masks = rank[name]["masks"]
            for module in RESIDUAL:
                kept = torch.cat([m.flatten() for m in masks[module]]).double()
                deviation = (0.3 * 0.7 / kept.numel()) ** 0.5
                assert abs(kept.mean().item() - 0.7) < 4 * deviation, (name, module)
            assert not torch.equal(masks[RESIDUAL[0]][0], masks[RESIDUAL[1]][0])


@pytest.mark.parametrize("name", CASES)
def test_an_update_draws_the_same_again(name: str, ranks: list[dict[str, Any]]) -> None:
    """A91: masks are a function of the place in the run: stray draws on one rank change nothing, nor does starting anew."""
    for rank in ranks:
        first, again = rank[name]["gradients"]
        assert first.keys() == again.keys()
        assert [n for n, g in first.items() if not torch.equal(g, again[n])] == []


def test_recomputation_draws_the_same_masks(ranks: list[dict[str, Any]]) -> None:
    """A131 under tensor and sequence parallelism: gradients bit for bit those without recomputation."""
    for rank in ranks:
        plain, recomputed = (rank[name]["gradients"][0] for name in ("sequence", "sequence, recomputed"))
        assert [n for n, g in plain.items() if not torch.equal(g, recomputed[n])] == []

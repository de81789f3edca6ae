"""Live memory by dispatch, against the allocator's own events in torch's profiler, and what is told apart.

Known-fault rows: A109 (peaks by phase, reset), A111 (logits are dead before the next forward).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.measure.live_memory import LiveMemory

torch.set_num_threads(1)
V, D = 512, 16


def made() -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(V, D), nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, V))
    return model, torch.optim.AdamW(model.parameters(), fused=True), torch.randint(0, V, (8, 32))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, memory: Any = None) -> None:
    logits = model(ids)
    loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
    del logits
    loss.backward()
    if memory is not None:
        memory.label("gradients", [p.grad for p in model.parameters() if p.grad is not None])
        memory.enter("update")
    optimizer.step()
    optimizer.zero_grad()


def test_the_peak_is_that_of_the_allocator() -> None:
    """Its events, added up: what was allocated before the window is not in them, so the growth is compared."""
    memory = LiveMemory(V)
    with memory:
        model, optimizer, ids = made()
        step(model, optimizer, ids)
        memory.clear()
        memory.enter("forward")
        base = memory.live
        step(model, optimizer, ids)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step(model, optimizer, ids)
    results: Any = profiler.profiler.kineto_results  # type: ignore[union-attr]
    live = most = 0
    for event in sorted((e for e in results.events() if e.name() == "[memory]"), key=lambda event: event.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    assert most > 1_000_000
    assert abs(memory.peak().bytes - base - most) < 0.01 * most


def test_phases_and_categories() -> None:
    """Forward, backward and update have their own highs; logits are known by their width; nothing of an update stays."""
    memory = LiveMemory(V)
    with memory:
        model, optimizer, ids = made()
        memory.label("parameters", model.parameters())
        at_rest = []
        for _ in range(3):
            memory.clear()
            memory.enter("forward")
            step(model, optimizer, ids, memory)
            states = [v for state in optimizer.state.values() for v in state.values() if v.dim()]
            memory.label("optimizer states", states)
            at_rest.append(memory.live)
    numel = sum(p.numel() for p in model.parameters())
    peak, phases = memory.peak(), memory.peak_by_phase
    assert set(phases) == {"forward", "backward", "update"}
    assert peak.bytes == phases["backward"] > phases["forward"] > phases["update"]
    assert peak.phase == "backward" and "log_softmax_backward" in peak.operator
    assert sum(peak.composition.values()) == peak.bytes
    assert peak.composition["parameters"] == 4 * numel
    states_bytes = sum(v.nbytes for state in optimizer.state.values() for v in state.values())
    assert peak.composition["optimizer states"] >= 8 * numel
    # logits, their logarithms and the gradient of these: 3 x 256 positions x V x 4 bytes
    assert peak.composition["logits and loss"] == 3 * 256 * V * 4
    assert at_rest[1] == at_rest[2], "A111: nothing of one update is alive in the next"
    assert at_rest[2] <= 4 * numel + states_bytes + ids.nbytes + 64


def test_emptied_storages_count_as_empty() -> None:
    """As `fully_shard` frees what it gathered: it resizes the storage and keeps the tensor."""
    memory = LiveMemory()
    with memory:
        gathered = torch.empty(1000)
        memory.enter("forward")
        before = memory.live
        gathered.untyped_storage().resize_(0)
        assert memory.live == before - 4000
        gathered.untyped_storage().resize_(4000)
        other = torch.empty(10)
        assert memory.live == before + 40
        assert memory.peak().composition == {"gathered parameters": 4000, "activations": 40}
        del gathered, other
    assert memory.live == 0
    assert torch.UntypedStorage.resize_.__name__ == "resize_"

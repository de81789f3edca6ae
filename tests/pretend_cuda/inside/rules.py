"""The rules of the pretend device, in a process that has it: `test_inside.py` runs this file.

Each breach of CUDA's rules is here once as it is made, and once as it is mended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from tests.pretend_cuda import installed
from torch import Tensor

LENGTH = 8


@pytest.fixture(autouse=True)
def breaches() -> Iterator[list[str]]:
    """What was found in this test; it must take away what it expects."""
    torch.cuda.synchronize()
    found: list[str] = []
    installed.device_.on_violation(found.append)
    yield found
    torch.cuda.synchronize()
    installed.device_.on_violation(installed._on_violation)
    assert not found


def take(breaches: list[str], text: str) -> None:
    assert len(breaches) == 1 and text in breaches.pop(), breaches


def on_side(work: Callable[[], object], *, wait: bool = True) -> torch.cuda.Stream:
    """`work` on a stream of its own, which waits for the present one first."""
    stream = torch.cuda.Stream()
    if wait:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    return stream


def ones() -> Tensor:
    return torch.ones(LENGTH, device="cuda")


# Streams and events


def test_a_stream_reads_what_it_did_not_wait_for(breaches: list[str]) -> None:
    x = ones()
    on_side(lambda: x + 1, wait=False)
    take(breaches, "reads what the default stream of cuda:0 writes")


ORDERS: dict[str, Callable[[torch.cuda.Stream], object]] = {
    "the present stream waits for the other": lambda side: torch.cuda.current_stream().wait_stream(side),
    "it waits for an event of the other": lambda side: torch.cuda.current_stream().wait_event(side.record_event()),
    "the host waits for the other": lambda side: side.synchronize(),
    "the host waits for an event": lambda side: side.record_event().synchronize(),
    "the host waits for the device": lambda side: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_stream_reads_what_it_waited_for(order: str) -> None:
    x = ones()
    side = on_side(lambda: x.add_(1))
    ORDERS[order](side)
    assert (x + 1).tolist() == [3.0] * LENGTH


def test_an_event_that_was_recorded_too_early(breaches: list[str]) -> None:
    x = ones()
    side = on_side(lambda: None)
    early = side.record_event()
    with torch.cuda.stream(side):
        x.add_(1)
    early.wait()
    x + 1
    take(breaches, " on the default stream of cuda:0 reads what stream")


def test_a_wait_is_passed_on() -> None:
    """A stream that waits for a stream that waited for the first is behind the first."""
    x = ones()
    first = on_side(lambda: x.add_(1))
    second = torch.cuda.Stream()
    second.wait_stream(first)
    torch.cuda.current_stream().wait_stream(second)
    assert x.sum().item() == 2 * LENGTH


def test_a_stream_writes_over_what_another_reads(breaches: list[str]) -> None:
    x = ones()
    side = on_side(lambda: x + 1)
    x.zero_()
    take(breaches, "writes over what stream")
    torch.cuda.current_stream().wait_stream(side)


def test_halves_of_a_tensor_are_apart(breaches: list[str]) -> None:
    """As one bucket of gradients travels while backward writes the next."""
    x = ones()
    on_side(lambda: x[: LENGTH // 2].mul_(2))
    x[LENGTH // 2 :].mul_(3)
    assert not breaches
    x.sum()
    take(breaches, "reads what stream")


def test_a_query_says_yes_late_and_orders_the_host() -> None:
    host, x = torch.zeros(LENGTH).pin_memory(), ones()
    host.copy_(x, non_blocking=True)
    event = torch.cuda.current_stream().record_event()
    assert not event.query() and host.isnan().all()
    assert event.query() and (host == 1).all()


def test_backward_runs_on_the_streams_of_forward() -> None:
    """Autograd's own thread waits where a gradient goes from one stream to another."""
    x = ones().requires_grad_()
    found: list[Tensor] = []
    side = on_side(lambda: found.append(x * 2))
    torch.cuda.current_stream().wait_stream(side)
    (found[0] * 3).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [6.0] * LENGTH


# Memory that is used again


def test_memory_is_freed_while_another_stream_reads_it(breaches: list[str]) -> None:
    held = [ones()]
    on_side(lambda: held[0] + 1)
    held.clear()
    ones()
    take(breaches, "writes over what stream")


def test_memory_that_record_stream_names_is_kept() -> None:
    held = [ones()]
    side = on_side(lambda: held[0] + 1)
    held.pop().record_stream(side)
    ones()


def test_memory_is_freed_after_a_wait() -> None:
    held = [ones()]
    torch.cuda.current_stream().wait_stream(on_side(lambda: held[0] + 1))
    held.clear()
    ones()


def test_memory_is_poison_before_it_is_written() -> None:
    assert torch.empty(LENGTH, device="cuda").isnan().all()


# Memory of the host


def test_a_copy_to_pinned_memory_is_there_when_the_host_has_waited() -> None:
    host = torch.zeros(LENGTH).pin_memory()
    host.copy_(ones(), non_blocking=True)
    assert host.isnan().all()
    torch.cuda.synchronize()
    assert (host == 1).all()


def test_pinned_memory_is_changed_while_it_travels(breaches: list[str]) -> None:
    host, x = torch.zeros(LENGTH).pin_memory(), ones()
    x.copy_(host, non_blocking=True)
    host.add_(1)
    torch.cuda.synchronize()
    take(breaches, "pinned memory was changed")


def test_pageable_memory_holds_the_host_up() -> None:
    """CUDA copies it before the call returns, so it may change then; a copy to it has ended."""
    host, x = torch.zeros(LENGTH), ones()
    with installed.logging() as notes:
        before = len(notes)
        x.copy_(host, non_blocking=True)
        host.add_(1)
        host.copy_(x, non_blocking=True)
        assert [kind for kind, *_ in notes[before:]] == ["pageable", "pageable"]
    assert (host == 0).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(LENGTH).pin_memory(),
        lambda: torch.zeros(LENGTH, pin_memory=True),
        lambda: torch.empty(LENGTH, device="cpu", pin_memory=True),
        lambda: torch.zeros(2 * LENGTH).pin_memory()[LENGTH:],
    ],
)
def test_pinned_memory_is_known(make: Callable[[], Tensor]) -> None:
    assert make().is_pinned() and not torch.zeros(LENGTH).is_pinned()


def test_registered_memory_is_pinned_until_it_is_given_back() -> None:
    host = torch.zeros(LENGTH)
    assert torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0) == 0 and host.is_pinned()
    assert torch.cuda.cudart().cudaHostUnregister(host.data_ptr()) == 0 and not host.is_pinned()
    assert torch.cuda.cudart().cudaHostUnregister(host.data_ptr()) != 0


# What the host waits for

WAITS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x[0] > 0),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "an index that is a mask": lambda x: x[x > 0],
    "a tensor of numbers": lambda x: torch.tensor([1.0, 2.0], device="cuda"),
    "all": lambda x: bool((x > 0).all()),
    "a pinned copy that is waited for": lambda x: x.copy_(torch.zeros(LENGTH).pin_memory()),
}
GOES_ON: dict[str, Callable[[Tensor], object]] = {
    "arithmetic": lambda x: (x * 2 + 1).sum().clamp(min=0),
    "a slice": lambda x: x[2:4].add_(1),
    "a choice": lambda x: torch.where(x > 0, x, 0),
    "a pinned copy": lambda x: x.copy_(torch.zeros(LENGTH).pin_memory(), non_blocking=True),
    "a full tensor": lambda x: torch.full((3,), 2.0, device="cuda"),
    "a number of the host": lambda x: x * torch.tensor(2.0),
    "a query": lambda x: torch.cuda.current_stream().record_event().query(),
}


@pytest.mark.parametrize("name", [*WAITS, *GOES_ON])
def test_waits_of_the_host_are_noted(name: str) -> None:
    x = ones()
    with installed.logging() as notes:
        before = len(notes)
        (WAITS | GOES_ON)[name](x)
        waits = [note for note in notes[before:] if note[0] in ("wait", "pageable")]
    assert bool(waits) == (name in WAITS), waits


# Devices


@pytest.mark.parametrize("mixed", [lambda x: x + torch.ones(LENGTH), lambda x: torch.cat([x, torch.ones(2)])])
def test_devices_are_not_mixed(mixed: Callable[[Tensor], object]) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        mixed(ones())


def test_gpus_are_not_mixed() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        ones() + torch.ones(LENGTH, device="cuda:1")


def test_a_rank_leaves_other_gpus_alone(breaches: list[str]) -> None:
    installed.device_.bind(0)
    try:
        torch.ones(1, device="cuda:1")
    finally:
        installed.device_.bind(-1)
    assert breaches and all("by a rank of cuda:0" in text for text in breaches)
    breaches.clear()


# Collectives


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """One rank: what is tested is when results are there, and on which stream."""
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_result_is_poison_until_it_is_waited_for(group: None) -> None:
    x = ones()
    work = dist.all_reduce(x, async_op=True)
    assert work is not None and installed.device_.host_view(x).isnan().all()
    work.wait()
    assert x.tolist() == [1.0] * LENGTH


def test_a_tensor_is_changed_while_it_travels(group: None, breaches: list[str]) -> None:
    x = ones()
    work = dist.all_reduce(x, async_op=True)
    x.mul_(2)
    assert work is not None
    work.wait()
    assert any("changed in place before wait()" in text for text in breaches)
    assert any("reads what stream" in text for text in breaches)
    breaches.clear()


def test_a_wait_orders_the_stream_that_waits(group: None, breaches: list[str]) -> None:
    x = ones()
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        work.wait()
        x.add_(1)
    x + 1
    take(breaches, "reads what stream")


def test_what_is_sent_may_not_be_written(group: None, breaches: list[str]) -> None:
    x, whole = ones(), torch.empty(LENGTH, device="cuda")
    work = dist.all_gather_into_tensor(whole, x, async_op=True)
    x.zero_()
    assert work is not None
    work.wait()
    assert any("an input was written to before wait()" in text for text in breaches)
    breaches.clear()
    assert whole.tolist() == [1.0] * LENGTH

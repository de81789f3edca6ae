"""The host memory that a save copies into: locked where CUDA allows it, and a line where CUDA does not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from shardwright.checkpoint.saver import _host_buffer

SIZE = 3 * 2**20
NONE = torch.empty(0, dtype=torch.uint8)


def cuda_that_answers(monkeypatch: pytest.MonkeyPatch, code: int) -> list[tuple[str, int]]:
    """CUDA's runtime, whose cudaHostRegister returns `code`; (function, address) of each call."""
    calls: list[tuple[str, int]] = []

    def register(address: int, size: int, flags: int) -> int:
        assert size in (SIZE, 2 * SIZE)
        calls.append(("register", address))
        return code

    def unregister(address: int) -> int:
        calls.append(("unregister", address))
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: not code)
    return calls


def test_a_buffer_is_locked_and_released(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = cuda_that_answers(monkeypatch, 0)
    first, refusal = _host_buffer(SIZE, NONE, True)
    second, refused_again = _host_buffer(2 * SIZE, first, True)
    assert (refusal, refused_again) == ("", "") and second.numel() == 2 * SIZE
    assert calls == [("register", first.data_ptr()), ("unregister", first.data_ptr()), ("register", second.data_ptr())]


def test_a_refusal_is_said_and_nothing_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = cuda_that_answers(monkeypatch, 2)
    first, refusal = _host_buffer(SIZE, NONE, True)
    assert refusal.startswith("CUDA does not lock 3.0 MiB of host memory for saving (cudaHostRegister: error 2).")
    _host_buffer(2 * SIZE, first, True)
    assert [name for name, _ in calls] == ["register", "register"]


def test_a_run_on_the_cpu_asks_nothing_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = cuda_that_answers(monkeypatch, 2)
    buffer, refusal = _host_buffer(SIZE, NONE, False)
    assert buffer.numel() == SIZE and refusal == "" and not calls

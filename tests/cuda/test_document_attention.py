"""Packed rows on one GPU: torch's flash kernel by lengths, and a run against the CPU. Skipped where there is none. Row A15."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.cuda.test_gpu import ROUNDING, metrics, shardwright
from tests.unit.attention.test_document_attention import ROWS, attention, drawn, heads, packed
from torch import Tensor

from shardwright.attention.core import fits_cuda_flash
from shardwright.attention.packed_rows import PackedRows

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device on this machine"),
]


def on_gpu(rows: PackedRows, tensors: list[Tensor]) -> tuple[PackedRows, list[Tensor]]:
    device = torch.device("cuda")
    return PackedRows(rows.documents, device), [t.detach().to(device, torch.bfloat16).requires_grad_() for t in tensors]


@pytest.mark.parametrize("window", [None, 3])
def test_flash_by_lengths_is_attention_of_documents(window: int | None) -> None:
    """A15: outputs and gradients in bf16 are those of the CPU in float64 to bf16's rounding, for several mixes."""
    torch.manual_seed(0)
    for mix in (ROWS, drawn(1), drawn(2)):
        rows = packed(mix)
        values = [heads(rows, n, 16) for n in (4, 2, 2)]
        grad = torch.randn(len(mix), 12, 4, 16, dtype=torch.float64)
        right = attention(rows, *values, sliding_window=window)
        wanted = torch.autograd.grad(right, values, grad)
        there, bf16 = on_gpu(rows, values)
        assert fits_cuda_flash(bf16[0], bf16[2])
        found = attention(there, *bf16, sliding_window=window)
        gradients = torch.autograd.grad(found, bf16, grad.to("cuda", torch.bfloat16))
        assert (found.double().cpu() - right).abs().max() < 0.03
        for own, other in zip(gradients, wanted):
            assert (own.double().cpu() - other).abs().max() < 0.1


def test_other_documents_leave_the_bits() -> None:
    """A15: with other contents in document A, every bit of document B's output stays."""
    torch.manual_seed(0)
    rows = packed([[30, 40, 9], [1, 40, 39]], 80)
    there, (q, k, v) = on_gpu(rows, [heads(rows, n, 16) for n in (4, 2, 2)])
    before = attention(there, q, k, v)
    changed = [t.detach().clone() for t in (q, k, v)]
    for t in changed:
        t[0, :, :30] = torch.randn_like(t[0, :, :30]) * 9
    after = attention(there, *changed)
    assert torch.equal(before[0, 30:], after[0, 30:]) and torch.equal(before[1], after[1])
    assert not torch.equal(before[0, :30], after[0, :30])


@pytest.mark.timeout(400)
def test_packed_losses_equal_those_of_the_cpu(tmp_path: Path) -> None:
    """Packed rows in float32: one GPU and one CPU process agree to rounding; MFU is there."""
    losses = {}
    for device in ("cuda", "cpu"):
        output = tmp_path / device
        done = shardwright(
            "train", "examples/tiny.yaml", "--training.max_steps", "5", "--hardware.device", device,
            "--data.batching", "pack", "--checkpoint.output_dir", str(output),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        losses[device] = [entry["train/loss"] for entry in metrics(output)]
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=ROUNDING["fp32"])

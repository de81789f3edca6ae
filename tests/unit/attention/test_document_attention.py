"""Packed rows without processes: where documents lie, their attention, and the models that keep them apart.

Covers A15, A17, A18, A19 and A20 (what a rank sees of documents under cp). The oracle is a softmax written out over a
T x T mask, and Transformers' own models run on each document alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests import tolerance
from tests.packed_documents import CPU, ROWS, WIDTH, packed
from torch import Tensor, nn

from shardwright.attention import document_attention
from shardwright.attention.packed_rows import PackedRows
from shardwright.layout.size_rules import chunks
from shardwright.parallel.context.shard import as_one_row, as_rows, document_blocks


def drawn(seed: int, rows: int = 5, width: int = WIDTH) -> list[list[int]]:
    """A random mix of documents; some rows end in padding."""
    g, found = torch.Generator().manual_seed(seed), []
    for _ in range(rows):
        lengths: list[int] = []
        while (left := width - sum(lengths)) > 0 and (torch.rand((), generator=g) < 0.85 or not lengths):
            lengths.append(1 + int(torch.randint(0, left, (), generator=g)))
        found.append(lengths)
    return found


def test_spans_positions_and_groups() -> None:
    """A18 A19: padding is no document; positions start at 0 in each document; documents of one length are one group."""
    rows = packed(ROWS)
    assert rows.spans == (
        (0, 0, 3), (0, 3, 8), (0, 8, 9), (1, 0, 12), (3, 0, 1), (3, 1, 2), (3, 2, 6), (3, 6, 12)
    )  # fmt: skip
    assert rows.position_ids.tolist() == [
        [0, 1, 2, 0, 1, 2, 3, 4, 0, 0, 0, 0], [*range(12)], [0] * 12, [0, 0, 0, 1, 2, 3, 0, 1, 2, 3, 4, 5]
    ]  # fmt: skip
    assert rows.groups == ((1, 12), (1, 6), (1, 5), (1, 4), (1, 3), (3, 1))
    assert rows.ends.tolist() == [0, 3, 8, 9, 21, 22, 23, 27, 33] and rows.longest == 12
    assert [packed(mix).whole for mix in ([[12]], [[], []], [[11]], ROWS)] == [True, True, False, False]


def test_rows_are_prepared_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the loader's thread has prepared and pinned is what the rows compute themselves, and is only copied later."""
    monkeypatch.setattr(Tensor, "pin_memory", Tensor.clone)
    rows, right = packed(ROWS), packed(ROWS)
    rows.prepare()
    pinned = rows.pinned()
    monkeypatch.setattr(torch, "arange", None)  # nothing is computed any more
    monkeypatch.setattr(Tensor, "nonzero", None)
    assert pinned.documents.data_ptr() != rows.documents.data_ptr() and pinned.positions is not rows.positions
    found = (pinned.position_ids, pinned.ends, *vars(pinned.grouped).values(), *vars(pinned.dense).values())
    plain = (pinned.spans, pinned.whole, pinned.groups, pinned.longest)
    monkeypatch.undo()
    expected = (right.position_ids, right.ends, *vars(right.grouped).values(), *vars(right.dense).values())
    assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(found, expected, strict=True))
    assert plain == (right.spans, right.whole, right.groups, right.longest)


def test_separators_belong_to_the_document_that_they_end() -> None:
    """A18: [a b SEP c d SEP pad pad] as the loader numbers it gives positions 0 1 2 0 1 2 and no key for padding."""
    rows = PackedRows(torch.tensor([[0, 0, 0, 1, 1, 1, -1, -1]], dtype=torch.int32), CPU)
    assert rows.spans == ((0, 0, 3), (0, 3, 6)) and rows.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 0, 0]]


@pytest.mark.parametrize("order", ["grouped", "dense"])
def test_orders_go_there_and_back(order: str) -> None:
    """What is taken and put back is itself, zero where padding was; gradients take the same way."""
    rows = packed(ROWS)
    x = torch.randn(4 * WIDTH, 2, dtype=torch.float64, requires_grad=True)
    places = getattr(rows, order)
    real = (rows.documents.flatten() >= 0).unsqueeze(1)
    found = places.put(places.take(x))
    assert torch.equal(found, x * real)
    found.backward(torch.ones_like(x))
    assert torch.equal(x.grad, real.expand_as(x).double())
    assert len(places.take(x)) == int(real.sum())


def written_out(
    q: Tensor, k: Tensor, v: Tensor, rows: PackedRows, window: int | None, softcap: float | None, scale: float
) -> Tensor:
    """Attention over a T x T mask, [B, T, N, H]; rows of the mask without a key give zeros."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores, numbers = q @ k.transpose(-1, -2) * scale, rows.documents
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    place = torch.arange(numbers.shape[1])
    distance = place[:, None] - place
    seen = (distance >= 0) & (distance < (window or len(place)))
    seen = (seen & (numbers[:, :, None] == numbers[:, None]) & (numbers[:, :, None] >= 0)).unsqueeze(1)
    weights = torch.where(seen, scores.exp(), 0.0)
    return (weights / weights.sum(-1, keepdim=True).clamp(min=1e-300) @ v).transpose(1, 2)


def heads(rows: PackedRows, n: int, width: int = 8, dtype: torch.dtype = torch.float64) -> Tensor:
    b, t = rows.documents.shape
    return torch.randn(b, t, n, width, dtype=dtype).transpose(1, 2).requires_grad_()


def attention(rows: PackedRows | None, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return document_attention.document_attention(nn.Module(), q, k, v, None, documents=rows, **options)[0]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 2},
    "softcap": {"softcap": 3.0},
    "softcap and window": {"softcap": 3.0, "sliding_window": 3},
}


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_attention_and_gradients(options: dict[str, Any], kv_heads: int) -> None:
    """A15: outputs and gradients equal the masked softmax, for random mixes, documents of one token and padded rows."""
    torch.manual_seed(0)
    for mix in (ROWS, *(drawn(seed) for seed in range(4))):
        rows = packed(mix)
        q, k, v = heads(rows, 4), heads(rows, kv_heads), heads(rows, kv_heads)
        grad = torch.randn(len(mix), WIDTH, 4, 8, dtype=torch.float64)
        window, softcap = options.get("sliding_window"), options.get("softcap")
        right = written_out(q, k, v, rows, window, softcap, 0.4)
        wanted = torch.autograd.grad(right, (q, k, v), grad)
        found = attention(rows, q, k, v, scaling=0.4, **options)
        dtype = torch.float32 if softcap else torch.float64  # the softmax behind a softcap is in float32
        rounding = tolerance.mixed(WIDTH, 8, dtype=dtype)
        assert torch.allclose(found, right, rtol=0, atol=rounding * float(right.abs().max()))
        for own, other in zip(torch.autograd.grad(found, (q, k, v), grad), wanted):
            assert torch.allclose(own, other, rtol=0, atol=2 * rounding * float(other.abs().max()))


def test_rows_of_one_document_are_plain_causal_attention() -> None:
    """Without documents, and where each row is one, torch's causal attention is called once, on the tensors as they are."""
    rows = packed([[WIDTH]] * 3)
    q, k, v = heads(rows, 4), heads(rows, 2), heads(rows, 2)
    options: dict[str, Any] = {"is_causal": True, "enable_gqa": True, "scale": 0.4}
    right = nn.functional.scaled_dot_product_attention(q, k, v, **options)
    assert torch.equal(attention(None, q, k, v, scaling=0.4), right.transpose(1, 2))
    assert torch.equal(attention(rows, q, k, v, scaling=0.4), right.transpose(1, 2))


def test_dropout_stays_inside_documents() -> None:
    """Weights that are dropped are those of a document's own keys: with values of one document 1 and of others 0."""
    torch.manual_seed(0)
    rows = packed([[6, 6]])
    q, k = heads(rows, 2), heads(rows, 2)
    v = torch.zeros(1, 2, WIDTH, 8, dtype=torch.float64)
    v[:, :, :6] = 1.0
    found = attention(rows, q, k, v, dropout=0.5)
    assert (found[:, 6:] == 0).all() and len(found[:, :6].unique()) > 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_other_documents_leave_the_bits(options: dict[str, Any], dtype: torch.dtype) -> None:
    """A15: with other contents (and infinities) in documents A, every bit of document B's outputs and gradients stays."""
    torch.manual_seed(0)
    rows, width = packed([[30, 40, 9], [1, 40, 39], [80]], 80), 16
    q, k, v = (heads(rows, n, width, dtype) for n in (4, 2, 2))
    other = [t.detach().clone() for t in (q, k, v)]
    for t in other:
        t[0, :, :30], t[1, :, 41:] = torch.randn_like(t[0, :, :30]) * 9, float("inf")
    changed = [t.requires_grad_() for t in other]
    grad = torch.randn(3, 80, 4, width, dtype=dtype)
    found, again = attention(rows, q, k, v, **options), attention(rows, *changed, **options)
    kept = [(0, slice(30, 80)), (1, slice(0, 41)), (2, slice(0, 80))]
    gradients = [torch.autograd.grad(out, ts, grad) for out, ts in ((found, (q, k, v)), (again, changed))]
    for row, tokens in kept:
        assert torch.equal(found[row, tokens], again[row, tokens])
        for own, theirs in zip(*gradients):
            assert torch.equal(own[row, :, tokens], theirs[row, :, tokens])
    assert not torch.equal(found[0, :30], again[0, :30])


@pytest.mark.parametrize("window", [None, 3])
def test_flash_is_told_lengths_ends_and_window(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's call, its kernel replaced by the masked softmax on documents one behind another. The kernel: tests/cuda."""
    torch.manual_seed(0)

    def flash(
        q: Tensor, k: Tensor, v: Tensor, ends: Tensor, ends_k: Tensor, longest: int, *rest: Any, **named: Any
    ) -> tuple[Tensor]:
        lengths = torch.diff(ends).tolist()
        assert ends.dtype == torch.int32 and ends is ends_k and longest == rest[0] == max(lengths)
        assert rest[1:] == (0.25, True, False) and named["window_size_right"] == 0
        left = named["window_size_left"]
        one = packed([lengths], sum(lengths))
        batch = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        return (written_out(*batch, one, left + 1 if left >= 0 else None, None, named["scale"])[0],)

    monkeypatch.setattr(document_attention, "flash_attention_by_lengths", flash)
    monkeypatch.setattr(document_attention, "fits_cuda_flash", lambda query, value: True)
    for mix in (ROWS, drawn(1), [[5, 7], [12]]):
        rows = packed(mix)
        q, k, v = heads(rows, 4), heads(rows, 2), heads(rows, 2)
        right = written_out(q, k, v, rows, window, None, 0.3)
        found = attention(rows, q, k, v, scaling=0.3, dropout=0.25, sliding_window=window)
        assert torch.allclose(found, right, rtol=0, atol=tolerance.mixed(WIDTH, 8) * float(right.abs().max()))


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("cp", [2, 4])
def test_blocks_of_ranks_are_the_pairs_of_documents(cp: int, balanced: bool) -> None:
    """A20 A21: gathered or passed round, each query sees every key of its document up to its own once, and no other."""
    width = 16
    owners = [[t for own in chunks(width, cp, rank, balanced) for t in own] for rank in range(cp)]
    for mix in (*(drawn(seed, 3, width) for seed in range(5)), [[7, 3], [16], []]):
        spans = packed(mix, width).spans
        tokens = width // cp
        for rank, own in enumerate(owners):
            places, queries = chunks(width, cp, rank, balanced), [(b, t) for b in range(3) for t in own]
            every = [(b, t) for b in range(3) for t in range(width)]
            row = pairs(document_blocks(spans, places, [range(width)]), queries, every)
            ring: list[Any] = []
            for source, others in enumerate(owners):
                held = chunks(width, cp, source, balanced)
                found = document_blocks(spans, places, held)
                assert (source == rank) == any(causal for _, _, causal in found) or not found
                ring += pairs(found, queries, [(b, t) for b in range(3) for t in others])
            wanted = sorted(((r, q), (r, k)) for r, s, e in spans for q in own if s <= q < e for k in range(s, q + 1))
            assert sorted(row) == wanted and sorted(ring) == wanted
        x = torch.randn(3, 2, tokens, 4)
        assert torch.equal(as_rows(as_one_row(x), 3), x)


def pairs(blocks: list[Any], queries: list[Any], keys: list[Any]) -> list[Any]:
    found = []
    for a, b, causal in blocks:
        own, others = queries[a], keys[b]
        assert not causal or own == others, "a causal block has the same tokens on both sides"
        found += [(q, k) for q in own for k in others if not causal or k[1] <= q[1]]
    return found

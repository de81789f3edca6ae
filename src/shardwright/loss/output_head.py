"""The head of a causal language model, and what the model does with its logits after the head.

A loss in chunks is computed where the head stands, so it must know what the model's own forward would do with the logits:
divide them by a number, cap them with tanh, widen them. No table of families says so: the model's forward runs on meta, with
a `DeferredLoss` in place of logits that records each step. A model that does anything else is refused by name.

B rows, T positions, D width of hidden states, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import ModelError, ShardwrightError
from shardwright.models.model_parts import Parts
from shardwright.torch_private import register_pytree_node

PROBE_TOKENS = 4


@dataclass(frozen=True)
class Step:
    """One thing done to each logit: `divide` and `multiply` by `number`, `tanh`, or `widen` to float32."""

    name: str
    number: float = 1.0

    def __call__(self, logits: Tensor) -> Tensor:
        if self.name == "divide":
            return logits / self.number
        if self.name == "multiply":
            return logits * self.number
        return torch.tanh(logits) if self.name == "tanh" else logits.float()


def apply_steps(steps: Sequence[Step], logits: Tensor) -> Tensor:
    """`logits` after the steps that the model takes after its head."""
    for step in steps:
        logits = step(logits)
    return logits


@dataclass(frozen=True, eq=False)
class DeferredLoss:
    """Takes the place of logits, and carries the sum of their loss, a scalar with its graph.

    expected: the steps that the loss was computed with; None: only records.
    done: the steps that the model has taken so far.
    """

    loss: Tensor
    expected: tuple[Step, ...] | None
    done: tuple[Step, ...] = ()

    def _after(self, step: Step) -> DeferredLoss:
        done = (*self.done, step)
        if self.expected is not None and self.expected[: len(done)] != done:
            raise self._differs(done)
        return replace(self, done=done)

    def _differs(self, done: tuple[Step, ...]) -> ShardwrightError:
        return ShardwrightError(
            f"The model does {done} with its logits, where {self.expected} was found before the run.",
            "The loss in chunks was computed with what was found.",
            "Set memory.loss_chunk_tokens to 0.",
        )

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.tanh:
            return args[0].tanh()
        raise TypeError(f"the model calls {getattr(function, '__name__', function)} with its logits")

    def __truediv__(self, number: Any) -> DeferredLoss:
        return self._after(Step("divide", _number(number)))

    def __mul__(self, number: Any) -> DeferredLoss:
        return self._after(Step("multiply", _number(number)))

    __rmul__ = __mul__

    def tanh(self) -> DeferredLoss:
        return self._after(Step("tanh"))

    def float(self) -> DeferredLoss:
        return self._after(Step("widen"))

    def to(self, dtype: Any) -> DeferredLoss:
        if dtype is not torch.float32:
            raise TypeError(f"the model turns its logits into {dtype}")
        return self.float()

    def contiguous(self) -> DeferredLoss:
        return self

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the model reads `{name}` of its logits")

    def finished(self) -> Tensor:
        """The loss, once the model has taken all expected steps."""
        if self.done != self.expected:
            raise self._differs(self.done)
        return self.loss


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"the model combines its logits with a {type(value).__name__}")
    return float(value)


# fully_shard (torch < 2.13) finds the tensors of what a module returns through this
register_pytree_node(
    DeferredLoss,
    lambda d: ([d.loss], (d.expected, d.done)),
    lambda leaves, context: DeferredLoss(next(iter(leaves)), *context),
    serialized_type_name="shardwright.loss.output_head.DeferredLoss",
)


def steps_after_head(model: nn.Module, parts: Parts) -> tuple[Step, ...]:
    """What `model` (whole, on meta) does with its logits after the head, in order.

    Raises `ModelError` for a model without a known head, or with another use of its logits, by name.
    """
    kind = type(model).__name__
    base: Any = getattr(model, "base_model", model)
    if parts.head is None or base is model or not hasattr(model, "config"):
        raise _refused(kind, "the model is not a causal language model of Transformers with a head of its own")
    head: Any = model.get_submodule(parts.head)
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise _refused(kind, f"its head is a {type(head).__name__}, not an nn.Linear")
    returned = _run_on_meta(model, base, head)
    if not isinstance(returned, DeferredLoss):
        raise _refused(kind, "it does not return what its head makes of hidden states")
    return returned.done


class _Hidden:
    """What the blocks return: hidden states, and nothing else that a model may hand on."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, place: Any) -> Any:
        return self.last_hidden_state if place == 0 else ()

    def __getattr__(self, name: str) -> None:
        return None


def _run_on_meta(model: Any, base: nn.Module, head: nn.Linear) -> Any:
    """The logits that `model` returns where its blocks give hidden states on meta and its head a `DeferredLoss`."""
    hidden = torch.empty(1, PROBE_TOKENS, head.in_features, device="meta")
    ids = torch.zeros(1, PROBE_TOKENS, dtype=torch.int64, device="meta")
    seen: list[Any] = []

    def record(x: Tensor) -> DeferredLoss:
        seen.append(x.shape)
        return DeferredLoss(x.new_zeros(()), None)

    base.forward = lambda *args, **kwargs: _Hidden(hidden)
    head.forward = record  # type: ignore[method-assign, assignment]
    try:
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits
    except (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise _refused(type(model).__name__, str(error).splitlines()[0]) from error
    finally:
        del base.forward, head.forward
    if seen != [hidden.shape]:
        raise _refused(type(model).__name__, f"its head is called with {seen}, not once with whole rows")
    return logits


def _refused(kind: str, reason: str) -> ModelError:
    return ModelError(
        f"The loss of {kind} cannot be computed in chunks: {reason}.",
        "Chunks replace the logits, which are then never whole.",
        "Set memory.loss_chunk_tokens to auto or 0.",
    )

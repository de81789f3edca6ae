"""Inputs that were made ahead belong to the microbatch that they were made of."""

from __future__ import annotations

from dataclasses import replace

import torch

from shardwright.data.loader import Microbatch
from shardwright.train.inputs import HostInputs, ReadyMicrobatch


def test_a_replaced_field_makes_the_inputs_of_before_void() -> None:
    """A hook may replace the labels of a batch: training with the old ones would be silently wrong."""
    ids, labels = torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.long)
    microbatch = Microbatch(0, ids, labels, (0,))
    inputs = HostInputs(ids, labels, None, None, None, None)
    ready = ReadyMicrobatch(**vars(microbatch), inputs=inputs, made_of=microbatch)
    assert ready.is_unchanged
    assert not replace(ready, labels=labels + 1).is_unchanged
    assert not replace(ready, weights=torch.ones(1, 4)).is_unchanged

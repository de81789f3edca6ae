"""The table of dtypes says what torch and safetensors say."""

from __future__ import annotations

import torch
from safetensors.torch import load, save

from shardwright.dtypes import DTYPES
from shardwright.models.torch_dtypes import SAFETENSORS_CODES, TORCH_DTYPES


def test_bytes_and_eps_are_torchs() -> None:
    for name, dtype in DTYPES.items():
        stated = TORCH_DTYPES[name]
        assert dtype.bytes == stated.itemsize, name
        assert dtype.eps == (torch.finfo(stated).eps if stated.is_floating_point else 0), name


def test_codes_are_those_of_the_safetensors_library() -> None:
    for dtype, code in SAFETENSORS_CODES.items():
        assert f'"dtype":"{code}"'.encode() in save({"t": torch.zeros(2, dtype=dtype)}), code
        assert load(save({"t": torch.zeros(2, dtype=dtype)}))["t"].dtype == dtype

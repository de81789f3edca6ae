"""torch's dtypes by the names of `shardwright.dtypes`: of the run file, and of safetensors files."""

from __future__ import annotations

import torch

from shardwright.dtypes import DTYPES

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, dtype.torch) for name, dtype in DTYPES.items()}
SAFETENSORS_DTYPES = {dtype.code: TORCH_DTYPES[name] for name, dtype in DTYPES.items() if dtype.code}
SAFETENSORS_CODES = {dtype: code for code, dtype in SAFETENSORS_DTYPES.items()}


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over values of `dtype`: float64 for float64, else float32."""
    return torch.promote_types(dtype, torch.float32)

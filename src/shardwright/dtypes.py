"""Every dtype that a run, a plan or a weights file names: the one table. torch's side of it is `models/torch_dtypes.py`."""

from __future__ import annotations

from typing import NamedTuple


class Dtype(NamedTuple):
    """One dtype.

    name: in run files and plans.
    bytes: of one element.
    eps: distance from 1 to the next number, as `torch.finfo(dtype).eps`; 0 for integers.
    torch: its attribute of torch.
    code: its name in safetensors files; empty where no such file is read or written.
    """

    name: str
    bytes: int
    eps: float
    torch: str
    code: str


DTYPES = {
    dtype.name: dtype
    for dtype in (
        Dtype("fp64", 8, 2.0**-52, "float64", "F64"),
        Dtype("fp32", 4, 2.0**-23, "float32", "F32"),
        Dtype("fp16", 2, 2.0**-10, "float16", "F16"),
        Dtype("bf16", 2, 2.0**-7, "bfloat16", "BF16"),
        Dtype("fp8", 1, 2.0**-3, "float8_e4m3fn", ""),
        Dtype("int64", 8, 0.0, "int64", "I64"),
        Dtype("int32", 4, 0.0, "int32", "I32"),
        Dtype("int16", 2, 0.0, "int16", "I16"),
        Dtype("int8", 1, 0.0, "int8", "I8"),
        Dtype("uint8", 1, 0.0, "uint8", "U8"),
        Dtype("bool", 1, 0.0, "bool", "BOOL"),
    )
}
"""Name -> dtype; floating-point dtypes from the finest to the coarsest."""

DTYPE_BYTES = {name: dtype.bytes for name, dtype in DTYPES.items()}

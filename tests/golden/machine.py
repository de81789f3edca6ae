"""What the bits of a loss depend on beside the code: the machine, and the libraries that choose their kernels by it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

INSTRUCTIONS = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_bf16",
)  # by these, libraries choose kernels
CHOICES = (
    "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR",
    "MKL_DEBUG_CPU_TYPE", "SHARDWRIGHT_TEST_THREADS",
)  # fmt: skip
"""Variables by which the user chooses instead."""


def cpu() -> str:
    """Model, family and instruction sets of the CPU; a hypervisor may hide some of a model's instructions."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    fields = dict(re.findall(r"^(.*?)\s*: (.*)$", text, re.MULTILINE))
    numbers = [fields.get(key, "?") for key in ("cpu family", "model", "stepping")]
    flags = fields.get("flags", "").split()
    return " ".join([fields.get("model name", "unnamed"), "/".join(numbers), *(f for f in INSTRUCTIONS if f in flags)])


def machine() -> dict[str, str]:
    """Losses have the same bits where all of this is the same."""
    built = torch.__config__.show()
    versions = re.findall(r"(?:Math Kernel Library Version|MKL-DNN|OpenBLAS) (v?[\d.]+)", built)
    blas = re.findall(r"BLAS_INFO=(\w+)", built)
    return {
        "torch": torch.__version__,
        "cpu": cpu(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "libraries": " ".join([*blas, *versions]),
        "onednn": "on" if torch.backends.mkldnn.enabled and torch.backends.mkldnn.is_available() else "off",
        "chosen": " ".join(f"{name}={os.environ[name]}" for name in CHOICES if name in os.environ),
    }

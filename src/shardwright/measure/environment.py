"""The software and the device that a run's numbers depend on."""

from __future__ import annotations

import platform
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import torch


def versions() -> dict[str, str]:
    """Versions of the packages that numbers depend on, and the processor."""
    packages = ("shardwright", "torch", "transformers", "tokenizers", "safetensors", "numpy")
    found = {name: metadata.version(name) for name in packages if _installed(name)}
    return {"python": platform.python_version(), "machine": platform.machine(), **found}


def device_facts(device: torch.device) -> dict[str, str | int]:
    """`device_name` as the driver or the kernel gives it, and for an accelerator `device_memory_bytes`."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {"device_name": properties.name, "device_memory_bytes": properties.total_memory}
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return {"device_name": line.partition(":")[2].strip()}
    return {"device_name": platform.processor() or platform.machine()}


def _installed(name: str) -> bool:
    return next(iter(metadata.Distribution.discover(name=name)), None) is not None

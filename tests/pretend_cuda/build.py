"""Builds the pretend device once per machine, source and version of torch, into a directory of the user's cache."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = ("device.cpp", "memory.cpp", "order.cpp", "collectives.cpp")
HEADERS = ("pretend.h", "memory.h")
TRIED_ON = "2.13"
MODULE = "pretend_cuda_device"


def unavailable() -> str:
    """Why the device cannot be built here; empty where it can. Loads no torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return "torch is not installed"
    version: dict[str, object] = {}
    exec((Path(spec.submodule_search_locations[0]) / "version.py").read_text(encoding="utf-8"), version)
    if version.get("cuda") or version.get("hip"):
        return f"torch {version['__version__']} is built for GPUs; the pretend device needs the CPU build"
    if not str(version["__version__"]).startswith(TRIED_ON):
        return f"the pretend device was tried on torch {TRIED_ON}, not on {version['__version__']}"
    missing = [tool for tool in ("g++", "ninja") if shutil.which(tool) is None and not _in_environment(tool)]
    return f"{' and '.join(missing)} not found" if missing else ""


def _in_environment(tool: str) -> bool:
    return (Path(sys.executable).parent / tool).exists()


def build_directory() -> Path:
    """Where the libraries of this source and this torch lie, or will lie."""
    import torch

    digest = hashlib.sha256(f"{torch.__version__} {sys.version}".encode())
    for name in (*SOURCES, *HEADERS, "hooks.cpp"):
        digest.update((HERE / name).read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "shardwright-pretend-cuda" / digest.hexdigest()[:16]


def build() -> Path:
    """The directory with both libraries, built where they are missing; other processes wait meanwhile."""
    import torch
    from torch.utils import cpp_extension

    place = build_directory()
    place.mkdir(parents=True, exist_ok=True)
    with (place / "building").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (place / "done").exists():
            return place
        home = Path(torch.__file__).parent
        include = [f"-I{home}/include", f"-I{home}/include/torch/csrc/api/include"]
        link = [f"-L{home}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{home}/lib"]
        hooks = [
            "g++",
            "-O1",
            "-std=c++20",
            "-shared",
            "-fPIC",
            str(HERE / "hooks.cpp"),
            "-o",
            str(place / "libhooks.so"),
        ]
        subprocess.run([*hooks, *include, *link], check=True)
        os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"  # ninja of the environment
        cpp_extension.load(
            MODULE,
            [str(HERE / name) for name in SOURCES],
            build_directory=str(place),
            extra_cflags=["-O1", "-g0", "-w", "-std=c++20"],
        )
        (place / "done").touch()
    return place


if __name__ == "__main__":
    print(unavailable() or build())

"""Builds the pretend device once per machine, source and version of torch, into a directory of the user's cache."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = ("device.cpp", "memory.cpp", "order.cpp", "collectives.cpp")
HEADERS = ("pretend.h", "memory.h")
TRIED_ON = "2.13"
HOOKS = "hooks.cpp"
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
    return "" if shutil.which("g++") else "g++ not found"


def build_directory() -> Path:
    """Where the libraries of this source and this torch lie, or will lie."""
    import torch

    digest = hashlib.sha256(f"{torch.__version__} {sys.version}".encode())
    for name in (*SOURCES, *HEADERS, HOOKS, "build.py"):
        digest.update((HERE / name).read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "shardwright-pretend-cuda" / digest.hexdigest()[:16]


def build() -> Path:
    """The directory with both libraries, built where they are missing; other processes wait meanwhile.

    Nothing is loaded here: a process that has loaded the device shows it to everything else that runs in it.
    """
    place = build_directory()
    place.mkdir(parents=True, exist_ok=True)
    with (place / "building").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "done").exists():
            print(
                f"Building the pretend CUDA device in {place}, once per source and version of torch.", file=sys.stderr
            )
            _compile(place)
            (place / "done").touch()
    return place


def _compile(place: Path) -> None:
    """Compiles each source, as many at a time as there are cores, and links two libraries."""
    import torch
    from torch.utils.cpp_extension import include_paths

    library = Path(torch.__file__).parent / "lib"
    flags = [
        "-O1",
        "-g0",
        "-w",
        "-std=c++20",
        "-fPIC",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]
    flags += [
        f"-DTORCH_EXTENSION_NAME={MODULE}",
        f"-I{sysconfig.get_path('include')}",
        *(f"-I{p}" for p in include_paths()),
    ]
    link = ["-shared", f"-L{library}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{library}"]

    def compiled(name: str) -> str:
        made = str(place / f"{name}.o")
        subprocess.run(["g++", "-c", str(HERE / name), "-o", made, *flags], check=True)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        *parts, hooks = pool.map(compiled, (*SOURCES, HOOKS))
    subprocess.run(["g++", hooks, "-o", str(place / "libhooks.so"), *link], check=True)
    module = ["-o", str(place / f"{MODULE}.so"), *link, "-ltorch", "-ltorch_python", f"-L{place}", "-lhooks"]
    subprocess.run(["g++", *parts, *module, f"-Wl,-rpath,{place}"], check=True)


if __name__ == "__main__":
    print(unavailable() or build())

"""Host memory of loading a model: this project's ranks against one full copy through from_pretrained.

Writes a float32 Llama of about --gigabytes with random weights (one tensor at a time), then measures, each in
a process of its own:

- `from_pretrained`: one process that holds everything;
- `materialise`: --ranks gloo ranks with fully_shard, each reading its rows;
- `safe_open`: the same rows read through safetensors' mapped slices, for the choice of the reading method;
- `random`: materialise with init: random.

Every weight is written to once after loading, as the first step does: a mapped file costs nothing until then.

Anonymous memory (RssAnon) is what the process must hold; the peak of resident memory (VmHWM) also counts
pages of mapped files that the process has touched. Both are above what it had before the model was built.

    python benchmarks/load_memory.py --gigabytes 1 --ranks 2
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

MB = 10**6


def status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


class Peak:
    """Peak of RssAnon (sampled every 2 ms) and of all resident memory (by the kernel) above the start."""

    def __enter__(self) -> Peak:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM to what is resident now
        self.anonymous_base, self.resident_base = status_bytes("RssAnon"), status_bytes("VmRSS")
        self.anonymous, self._done = 0, threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._done.wait(0.002):
            self.anonymous = max(self.anonymous, status_bytes("RssAnon") - self.anonymous_base)

    def __exit__(self, *details: object) -> None:
        self._done.set()
        self._thread.join()
        self.resident = status_bytes("VmHWM") - self.resident_base
        self.kept = status_bytes("RssAnon") - self.anonymous_base


def write_llama(directory: Path, gigabytes: float) -> int:
    """A directory with safetensors of at most 200 MB; gives the bytes of all weights."""
    from transformers import LlamaConfig

    from shardwright.config.schema import Model
    from shardwright.export.files import append, header, split_files, write_index
    from shardwright.models import build_model

    width, vocabulary = 1024, 32_001
    block = 4 * width * width + 3 * width * 2816
    layers = max(1, round((gigabytes * 1e9 / 4 - 2 * vocabulary * width) / block))
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        architectures=["LlamaForCausalLM"],
    )
    config.dtype = torch.float32
    config.save_pretrained(directory)
    tensors = dict(
        build_model(Model(model_name_or_path=str(directory), init="random"), torch.float32).named_parameters()
    )
    files = split_files(tensors, 200 * MB)
    for file in files:
        (directory / file.name).write_bytes(header(file, tensors))
        for name in file.tensors:
            append(directory / file.name, torch.randn(tensors[name].shape) * 0.02)
    write_index(files, tensors, directory)
    return sum(tensor.numel() * 4 for tensor in tensors.values())


def measure(how: str, directory: str, rank: int, ranks: int, store: str) -> None:
    """In a process of its own: prints one line of JSON."""
    torch.set_num_threads(1)
    import transformers.models.llama.modeling_llama
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    from shardwright.config.schema import Model
    from shardwright.models import build_model, find_parts, materialise

    spec = Model(model_name_or_path=directory, init="random" if how == "random" else "pretrained")
    tiny = transformers.LlamaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    AutoModelForCausalLM.from_config(tiny)
    if how != "from_pretrained":
        dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
        mesh = init_device_mesh("cpu", (ranks,))
    start = time.perf_counter()
    with Peak() as peak:
        if how == "from_pretrained":
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        else:
            model = build_model(spec, torch.float32)
            for name in find_parts(model).blocks:
                fully_shard(model.get_submodule(name), mesh=mesh)
            fully_shard(model, mesh=mesh)
            if how == "safe_open":
                read_mapped(model, Path(directory))
            else:
                materialise(model, spec, seed=0, device=torch.device("cpu"))
        with torch.no_grad():
            for parameter in model.parameters():  # as the first step does: a mapped file costs nothing until then
                parameter.mul_(1.0)
    locals_ = [p.to_local() if how != "from_pretrained" else p for p in model.parameters()]
    held = sum(p.numel() * p.element_size() for p in locals_)
    row = {
        "how": how,
        "rank": rank,
        "held": held,
        "anonymous": peak.anonymous,
        "resident": peak.resident,
        "kept": peak.kept,
        "seconds": time.perf_counter() - start,
    }
    print(json.dumps(row), flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def read_mapped(model: torch.nn.Module, directory: Path) -> None:
    """The rows of this rank through safe_open, into tensors of the size of the shards."""
    from safetensors import safe_open

    placed = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for path, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = f"{path}.{leaf}"
            with safe_open(directory / placed[name], "pt") as file:
                rows = -(-parameter.shape[0] // ranks)
                part = file.get_slice(name)[rank * rows : (rank + 1) * rows].clone()
            module._parameters[leaf] = torch.nn.Parameter(
                torch.distributed.tensor.DTensor.from_local(
                    part,
                    parameter.device_mesh,
                    parameter.placements,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
            )


def run(how: str, directory: Path, ranks: int) -> list[dict[str, float]]:
    """The rows that the processes of one way of loading print."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "TRANSFORMERS_VERBOSITY": "error"}
    with tempfile.TemporaryDirectory() as scratch:
        processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    __file__,
                    "--measure",
                    how,
                    str(directory),
                    str(rank),
                    str(ranks),
                    f"{scratch}/store",
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(ranks)
        ]
        try:
            texts = [process.communicate(timeout=300) for process in processes]
        finally:
            for process in processes:
                process.kill()
    for process, (_, errors) in zip(processes, texts):
        if process.returncode:
            raise SystemExit(errors)
    return [json.loads(line) for out, _ in texts for line in out.splitlines() if line.startswith("{")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--measure", nargs=5, metavar=("HOW", "DIRECTORY", "RANK", "RANKS", "STORE"))
    arguments = parser.parse_args()
    if arguments.measure:
        how, directory, rank, ranks, store = arguments.measure
        measure(how, directory, int(rank), int(ranks), store)
        return
    with tempfile.TemporaryDirectory(prefix="load-memory-") as scratch:
        directory = Path(scratch) / "llama"
        total = write_llama(directory, arguments.gigabytes)
        print(f"Llama, {total / 4e6:.0f} M parameters, {total / MB:.0f} MB in float32. MB above the start:\n")
        print("| loaded by | rank | weights held | peak anonymous | peak resident | kept | seconds |")
        print("|---|---|---|---|---|---|---|")
        for how, ranks in (
            ("from_pretrained", 1),
            ("materialise", arguments.ranks),
            ("safe_open", arguments.ranks),
            ("random", arguments.ranks),
        ):
            for row in run(how, directory, ranks):
                sizes = " | ".join(f"{row[key] / MB:.0f}" for key in ("held", "anonymous", "resident", "kept"))
                print(f"| {row['how']} | {row['rank']} | {sizes} | {row['seconds']:.1f} |", flush=True)


if __name__ == "__main__":
    main()

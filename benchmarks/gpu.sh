#!/usr/bin/env bash
# `make gpu`: on a machine with a GPU and its own Python and torch. Installs nothing; says which wheels to bring.
# Ends within ten minutes: the CUDA tests, `check` on one GPU, and a bf16 compiled run of a Llama of about 1B parameters
# beside a hand-written loop, with MFU, and allocated and reserved memory.
set -u
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
export PYTHONPATH="$PWD/src:${PYTHONPATH:-}" TOKENIZERS_PARALLELISM=false
"$PYTHON" - <<'CHECK' || exit 2
import importlib.metadata as metadata, re, sys
wanted = {"torch": "", "transformers": "", "pydantic": "", "pyyaml": "", "typer": "", "rich": "", "safetensors": "",
          "tokenizers": "", "datasets": "", "psutil": "", "pytest": "", "pytest-timeout": ""}
missing = []
for name in wanted:
    try:
        wanted[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        missing.append(name)
print("python", sys.version.split()[0], *(f"{name} {version}" for name, version in wanted.items() if version))
if missing:
    print("Missing packages; bring their wheels (and what they need):", " ".join(missing))
    sys.exit(1)
major, minor = map(int, re.match(r"(\d+)\.(\d+)", wanted["torch"]).groups())
if not (2, 11) <= (major, minor) < (2, 16):
    sys.exit(f"torch {wanted['torch']} is outside 2.11 to 2.15")
import torch
if not torch.cuda.is_available():
    sys.exit("torch finds no CUDA device")
print(torch.cuda.get_device_name(0), f"{torch.cuda.get_device_properties(0).total_memory / 1e9:.1f} GB")
CHECK
failed=0
step() { echo; echo "== $*"; timeout "$limit" "$@" || { failed=1; echo "== failed: $*"; }; }
limit=240 step "$PYTHON" -m pytest tests/cuda -q -x
limit=90 step "$PYTHON" -m shardwright check examples/tiny.yaml --layouts ddp,zero1,zero2,zero3 --nproc-per-node 1
limit=240 step "$PYTHON" benchmarks/one_gpu.py
exit $failed

"""Every causal family of Transformers, built tiny and run here against Transformers alone: `--write` makes docs/families.md.

Three documents of unequal lengths, in float64. The reference is the family's own class with eager attention, given each
document by itself, without padding. Ours is the engine of `train` on one rank, under pad, bucket and pack. What is compared
is the loss and the norm of its gradient; what the gate before a run refuses is noted with its reason.

    python benchmarks/families.py                  # all, as a table
    python benchmarks/families.py llama gpt_oss    # these
    python benchmarks/families.py --write          # all, into docs/families.md
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.check.throughout import Float64Throughout
from shardwright.config.load import load_run_file
from shardwright.data.loader import Microbatch, UpdateBatch
from shardwright.errors import ShardwrightError
from shardwright.layout.axes import Axes
from shardwright.models.build import build_model, quiet_transformers
from shardwright.parallel.apply import check_model
from shardwright.parallel.process_group import connect
from shardwright.train.update import Engine

LENGTHS = (12, 30, 40)
WIDTH = 48
VOCABULARY = 320
BATCHINGS = ("pad", "bucket", "pack")
PAGE = Path(__file__).parents[1] / "docs" / "families.md"

SIZES: tuple[tuple[str, int], ...] = (
    (r"vocab_size(_.*)?$|.*_vocab_size$", VOCABULARY),
    (r"(hidden_size|d_model|n_embd|embed_dim|embedding_size|dim|word_embed_proj_dim|dim_model|emb_dim|hidden_dim)$", 32),
    (r"(num_hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers)$", 4),
    (r"(num_attention_heads|n_heads?|num_heads|encoder_attention_heads|decoder_attention_heads)$", 4),
    (r"(moe_|shared_expert_|expert_)intermediate_size$", 16),
    (r".*intermediate_size(_mlp)?$|.*ffn_dim$|.*ffn_hidden_size$|dim_ff$|n_inner$|dff$", 64),
    (r"(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_target_positions)$", 64),
    (r".*num_(local_)?experts$|n_routed_experts$|moe_num_experts$", 4),
    (r".*num_experts_per_tok$|moe_top_?k$|.*top_k_experts$", 2),
    (r"n_group$|topk_group$|n_shared_experts$|first_k_dense_replace$", 1),
    (r".*(sliding_window|window_size|attention_chunk_size)$", 8),
    (r"(q_lora_rank|kv_lora_rank|qk_rope_head_dim|qk_nope_head_dim|v_head_dim|qk_head_dim)$", 8),
)  # fmt: skip
"""What a key of a config becomes where it is a number, by the first pattern that matches."""


def tiny_config(family: str) -> dict[str, Any]:
    """config.json of a small model of `family`, from the defaults of its config: sizes by name, nothing random in training."""
    from transformers import CONFIG_MAPPING

    values = CONFIG_MAPPING[family]().to_dict()
    return {**_tiny(values), **SPECIAL.get(family, {}), "model_type": family}


def _tiny(values: dict[str, Any]) -> dict[str, Any]:
    heads = next((values[k] for k in ("num_attention_heads", "n_head") if k in values), None)
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and key.endswith("config"):
            result[key] = _tiny(value)
        elif isinstance(value, bool) or not isinstance(value, (int, float)):
            if key.endswith("token_id"):
                value = None
            result[key] = value
        elif key.endswith("token_id") or key.endswith("token_index"):
            result[key] = 1 if key == "pad_token_id" else 2
        elif "drop" in key and isinstance(value, float):
            result[key] = 0.0
        elif key in ("num_key_value_heads", "num_kv_heads"):
            result[key] = 4 if value == heads else 2
        elif key.endswith("head_dim") and isinstance(value, int):
            result[key] = 8
        else:
            small = next((size for pattern, size in SIZES if re.fullmatch(pattern, key)), None)
            result[key] = value if small is None or not isinstance(value, int) else small
    layers = next((result[k] for k in ("num_hidden_layers", "n_layer", "num_layers") if k in result), None)
    for key in [k for k in result if k.endswith(("layer_types", "layers_block_type", "no_rope_layers"))]:
        if isinstance(result[key], list) and layers:
            kinds = list(dict.fromkeys(result[key]))
            result[key] = [kinds[i % len(kinds)] for i in range(layers)]
    return result


SPECIAL: dict[str, dict[str, Any]] = {}
"""Values beside those of `tiny_config` that a family needs."""


@dataclass(frozen=True)
class Outcome:
    """What became of one family under one batching: equal, differs, refused, crashes, not built; and why."""

    verdict: str
    reason: str = ""


def rows(batching: str) -> list[list[Tensor]]:
    """The documents of each row."""
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(5, VOCABULARY, (length,), generator=generator) for length in LENGTHS]
    if batching == "pack":
        return [documents[:2], documents[2:]]
    return [[document] for document in documents]


def batch_of(batching: str) -> UpdateBatch:
    """The documents as one microbatch, as the loader makes it."""
    held = rows(batching)
    width = WIDTH if batching != "bucket" else -(-max(LENGTHS) // 8) * 8
    ids, labels = torch.zeros(len(held), width, dtype=torch.long), torch.full((len(held), width), -100)
    numbers = torch.full((len(held), width), -1, dtype=torch.int32)
    for row, documents in enumerate(held):
        start = 0
        for number, document in enumerate(documents):
            end = start + len(document)
            ids[row, start:end], labels[row, start : end - 1] = document, document[1:]
            numbers[row, start:end] = number
            start = end
    microbatch = Microbatch(
        0,
        ids,
        labels,
        tuple(range(len(held))),
        numbers if batching == "pack" else None,
        lengths=tuple(sum(map(len, row)) for row in held),
    )
    targets = int((labels != -100).sum())
    return UpdateBatch(0, (microbatch,), targets, sum(LENGTHS), ids.numel(), microbatch.row_ids)


def run_of(directory: Path, batching: str) -> Any:
    return load_run_file(
        None,
        {
            "model.model_name_or_path": str(directory),
            "model.init": "random",
            "data.train": ["-"],
            "data.max_length": WIDTH,
            "data.batching": batching,
            "parallelism.data_parallel": "ddp",
            "training.max_steps": 1,
            "training.global_batch_size": len(rows(batching)),
            "training.per_device_train_batch_size": len(rows(batching)),
            "training.learning_rate": 1e-3,
            "training.max_grad_norm": None,
            "checkpoint.export_hf": "none",
            **{f"precision.{name}_dtype": "fp64" for name in ("param", "reduce", "master")},
        },
    ).run


def randomised(model: nn.Module) -> None:
    """Gives every floating-point parameter a value of normal(0, 0.2) that follows from its name: norms and biases too."""
    for name, p in model.named_parameters():
        generator = torch.Generator().manual_seed(sum(ord(c) * (i + 1) for i, c in enumerate(name)))
        with torch.no_grad():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.2)


def alone(config: Any) -> tuple[float, float]:
    """(loss, gradient norm) of the documents one by one in Transformers' own model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    for p in model.parameters():  # buffers stay as float32 makes them, as in a run
        p.data = p.data.double()
    randomised(model)
    model.train()
    total, targets = torch.zeros((), dtype=torch.float64), sum(length - 1 for length in LENGTHS)
    with Float64Throughout():
        for document in (d for row in rows("pad") for d in row):
            logits = model(input_ids=document.unsqueeze(0), use_cache=False).logits[0]
            total = total + nn.functional.cross_entropy(logits[:-1].double(), document[1:], reduction="sum")
        (total / targets).backward()
    squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
    return total.item() / targets, math.sqrt(sum(s.item() for s in squares))


def ours(run: Any, batching: str) -> tuple[float, float]:
    """(loss, gradient norm) of the same documents in the engine."""
    engine = Engine(run, Axes(), torch.device("cpu"), 1)
    randomised(engine.module)
    with Float64Throughout():
        engine.forward_backward(batch_of(batching))
    norm, loss, _ = engine._agree(False)
    return loss / sum(length - 1 for length in LENGTHS), norm


def outcomes(family: str, directory: Path) -> Iterator[tuple[str, Outcome]]:
    """(batching, what became of it) of `family`."""
    from transformers import AutoConfig

    try:
        config = tiny_config(family)
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config))
        expected = alone(AutoConfig.from_pretrained(directory))
        if not all(map(math.isfinite, expected)):
            raise ValueError(f"not finite: {expected}")
    except Exception as error:
        if VERBOSE:
            traceback.print_exc()
        yield from (
            (b, Outcome("not built", f"{type(error).__name__}: {error}".splitlines()[0])) for b in BATCHINGS
        )
        return
    for batching in BATCHINGS:
        run = run_of(directory, batching)
        try:
            check_model(build_model(run.model, torch.float64), run)
        except ShardwrightError as error:
            yield batching, Outcome("refused", f"{error.what} {error.why}")
            continue
        except Exception as error:
            yield batching, Outcome("crashes at the gate", f"{type(error).__name__}: {error}"[:300])
            continue
        try:
            found = ours(run, batching)
        except Exception as error:
            if VERBOSE:
                traceback.print_exc()
            yield batching, Outcome("crashes", f"{type(error).__name__}: {error}"[:300])
            continue
        off = max(abs(a - b) / max(abs(b), 1e-300) for a, b in zip(found, expected))
        yield batching, Outcome("equal" if off < 1e-9 else "differs", f"{off:.1e}")


VERBOSE = False


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    with connect("cpu", 600, 1):
        yield


def main() -> int:
    global VERBOSE
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="*")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    asked = parser.parse_args()
    VERBOSE = asked.verbose
    quiet_transformers()
    warnings.simplefilter("ignore")
    with one_rank(), tempfile.TemporaryDirectory() as place:
        for family in asked.families or NAMES:
            line = [f"{b}: {o.verdict} {o.reason[:250]}" for b, o in outcomes(family, Path(place) / family)]
            if len(set(x.split(": ", 1)[1] for x in line)) == 1:
                line = [line[0].split(": ", 1)[1]]
            print(f"{family}: {'; '.join(line)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Every causal family of Transformers, built tiny and run here against Transformers alone: `--write` makes docs/families.md.

Three documents of unequal lengths, in float64. The reference is the family's own class with eager attention, given each
document by itself, without padding. Ours is the engine of `train` on one rank, under pad, bucket and pack, all documents in one
microbatch. What is compared is the loss and the norm of its gradient; what the gate before a run refuses is noted with its
reason. A family without sdpa is run with eager attention under pad and bucket, as its refusal says.

    python benchmarks/families.py                  # all, line by line
    python benchmarks/families.py llama gpt_oss    # these
    python benchmarks/families.py --write          # all, into docs/families.md
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.causal_configs import small_config

from shardwright.config.load import load_run_file
from shardwright.config.schema import RunFile
from shardwright.data.loader import Microbatch, UpdateBatch
from shardwright.errors import ShardwrightError
from shardwright.layout.axes import Axes
from shardwright.mesh.process_group import connect
from shardwright.models.build import build_model, quiet_transformers
from shardwright.parallel.apply import check_model
from shardwright.tools.check.force_float64 import ForceFloat64
from shardwright.train.decision import norm_of
from shardwright.train.update import UpdateEngine

LENGTHS = (12, 30, 40)
WIDTH, BUCKET = 48, 40
VOCABULARY = 320
BATCHINGS = ("pad", "bucket", "pack")
GROUP = 28
"""Families that one process runs, one after the other: what they leave in memory goes with it."""
LAYERS = 4
PAGE = Path(__file__).parents[1] / "docs" / "families.md"

SIZES: tuple[tuple[str, int], ...] = (
    (r".*vocab_size(_.*)?", VOCABULARY),
    (r"(hidden_size|d_model|n_embd|embed_dim|embedding_size|dim|word_embed_proj_dim|dim_model|emb_dim|hidden_dim)", 32),
    (r"(attention_hidden_size|lru_width|time_step_rank)", 32),
    (r"(num_hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers)", LAYERS),
    (r"(num_attention_heads|n_heads?|num_heads|encoder_attention_heads|decoder_attention_heads)", 4),
    (r"(linear_num_key_heads|linear_num_value_heads)", 2),
    (r"(moe_|shared_expert_|expert_).*intermediate_size", 16),
    (r".*intermediate_size(_mlp)?|.*ffn_dim|.*ffn_hidden_size|dim_ff|n_inner|dff|d_ff", 64),
    (r"(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_target_positions)", 64),
    (r".*num_(local_|routed_)?experts|n_routed_experts|moe_num_experts", 4),
    (r".*num_experts_per_tok|moe_top_?k|.*top_k_experts|moe_k", 2),
    (r"n_group|topk_group|n_shared_experts|first_k_dense_replace|mamba_n_groups|n_groups", 1),
    (r".*(sliding_window|window_size|attention_chunk_size|chunk_size)", 8),
    (r"(q_lora_rank|kv_lora_rank|qk_rope_head_dim|qk_nope_head_dim|v_head_dim)", 8),
    (r"qk_head_dim", 16),
    (r"(mamba_)?(d_state|state_size|ssm_state_size)", 8),
    (r"rotary_dim|mamba_n_heads|mamba_num_heads", 4),
    (r"mamba_d_head|mamba_head_dim", 16),
    (r"mamba_d_ssm", 64),
)  # fmt: skip
"""What a key of a config becomes where it is a whole number, by the first pattern that matches."""

SPECIAL: dict[str, dict[str, Any]] = {}
"""Values beside those of `tiny_config` that a family needs."""


FLOAT32 = 2.0**-24
"""One rounding to float32, which a few families make on their way, of sines for example, by the place in a tensor."""


@dataclass(frozen=True)
class Outcome:
    """What became of one family under one batching: equal, differs, refused, crashes, not built; and why."""

    verdict: str
    reason: str = ""


def tiny_configs(family: str) -> Iterator[dict[str, Any]]:
    """Values of config.json for a small model of `family`, from the defaults of its config: sizes by name, nothing random.

    First with every kind of layer among the four; then without the lists that a config makes itself of its sizes; then with
    the sizes that the tests of the planner have found to go together.
    """
    from transformers import CONFIG_MAPPING

    defaults = CONFIG_MAPPING[family]().to_dict()
    values = _tiny(defaults)
    special = {**copy.deepcopy(SPECIAL.get(family, {})), "model_type": family}
    yield {**values, **special}
    yield {**_changed(values, defaults), **special}
    if (made := small_config(family)) is not None:
        yield {**_own_tokens(json.loads(made[0].to_json_string(use_diff=False))), **special}


def _own_tokens(values: dict[str, Any]) -> dict[str, Any]:
    """`values` with the vocabulary of the documents, in which no token means anything."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        own = VOCABULARY if key == "vocab_size" else None if key.endswith("token_id") else value
        result[key] = _own_tokens(value) if isinstance(value, dict) else own
    return result


def _changed(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The sizes and rates of `values` that are not those of `defaults`."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        old = defaults.get(key)
        if isinstance(value, dict) and isinstance(old, dict) and key.endswith("config"):
            kind = {"model_type": value["model_type"]} if "model_type" in value else {}
            result[key] = kind | _changed(value, old)
        elif (isinstance(value, (int, float)) and value != old) or key.endswith("token_id"):
            result[key] = value
    return result


def _tiny(values: dict[str, Any]) -> dict[str, Any]:
    heads = next((values[key] for key in ("num_attention_heads", "n_head") if key in values), None)
    result = {key: _small(key, value, heads) for key, value in values.items()}
    for key, kinds in result.items():
        if key.endswith(("layer_types", "layers_block_type", "no_rope_layers")) and isinstance(kinds, list):
            each = list(dict.fromkeys(kinds))
            result[key] = [each[i % len(each)] for i in range(LAYERS)]
    return result


def _small(key: str, value: Any, heads: Any) -> Any:
    if isinstance(value, dict) and key.endswith("config"):
        return _tiny(value)
    if key.endswith(("token_id", "token_index")):
        return 1 if isinstance(value, int) and key == "pad_token_id" else 2 if isinstance(value, int) else None
    if key in ("is_decoder", "causal"):
        return True
    if isinstance(value, float):
        return 0.0 if "drop" in key or "noise" in key or "jitter" in key else value
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if key in ("num_key_value_heads", "num_kv_heads"):
        return 4 if value == heads else 2
    if key.endswith("head_dim") and not re.fullmatch(r"(qk|v|mamba).*", key):
        return 8
    return next((size for pattern, size in SIZES if re.fullmatch(pattern, key)), value)


def rows(batching: str) -> list[list[Tensor]]:
    """The documents of each row."""
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(5, VOCABULARY, (length,), generator=generator) for length in LENGTHS]
    if batching == "pack":
        return [documents[:2], documents[2:]]
    return [[document] for document in documents]


def batch_of(batching: str) -> UpdateBatch:
    """The documents as one microbatch, as the loader makes it."""
    held, width = rows(batching), BUCKET if batching == "bucket" else WIDTH
    ids, labels = torch.zeros(len(held), width, dtype=torch.long), torch.full((len(held), width), -100)
    numbers = torch.full((len(held), width), -1, dtype=torch.int32)
    for row, documents in enumerate(held):
        start = 0
        for number, document in enumerate(documents):
            end = start + len(document)
            ids[row, start:end], labels[row, start : end - 1] = document, document[1:]
            numbers[row, start:end] = number
            start = end
    lengths = tuple(sum(map(len, documents)) for documents in held)
    packed = numbers if batching == "pack" else None
    microbatch = Microbatch(0, ids, labels, tuple(range(len(held))), packed, lengths=lengths)
    return UpdateBatch(0, (microbatch,), int((labels != -100).sum()), sum(LENGTHS), ids.numel(), microbatch.row_ids)


def run_of(directory: Path, batching: str, attention: str) -> RunFile:
    count = len(rows(batching))
    values: dict[str, Any] = {
        "model.model_name_or_path": str(directory),
        "model.init": "random",
        "model.attn_implementation": attention,
        "data.train": ["-"],
        "data.max_length": WIDTH,
        "data.batching": batching,
        "parallelism.data_parallel": "ddp",
        "training.max_steps": 1,
        "training.global_batch_size": count,
        "training.per_device_train_batch_size": count,
        "training.learning_rate": 1e-3,
        "training.max_grad_norm": None,
        "checkpoint.export_hf": "none",
        **{f"precision.{name}_dtype": "fp64" for name in ("param", "reduce", "master")},
    }
    return load_run_file(None, values).run


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Gives every parameter values of normal(0, 0.2) that follow from its name: norms and biases too."""
    for name, p in model.named_parameters():
        seed = sum(ord(letter) * (place + 1) for place, letter in enumerate(name))
        drawn = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        p.copy_(drawn * 0.2)


def alone(directory: Path, seed: int = 0, training: bool = True) -> tuple[float, float]:
    """(loss, gradient norm) of the documents one by one in Transformers' own model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(directory)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    for p in model.parameters():  # buffers stay as float32 makes them, as in a run
        p.data = p.data.double()
    randomise(model)
    model.train(training)
    torch.manual_seed(seed)
    total = torch.zeros((), dtype=torch.float64)
    with ForceFloat64():
        for document in (document for row in rows("pad") for document in row):
            logits = model(input_ids=document.unsqueeze(0), use_cache=False).logits[0]
            total = total + nn.functional.cross_entropy(logits[:-1].double(), document[1:], reduction="sum")
        (total / _targets()).backward()
    squares = [p.grad.square().sum().item() for p in model.parameters() if p.grad is not None]
    return total.item() / _targets(), math.sqrt(sum(squares))


def _targets() -> int:
    return sum(length - 1 for length in LENGTHS)


def ours(run: RunFile, training: bool = True) -> tuple[float, float]:
    """(loss, gradient norm) of the same documents in the engine; the norm is 0 where it is not training."""
    engine = UpdateEngine(run, Axes(), torch.device("cpu"), 1)
    randomise(engine.module)
    batch = batch_of(run.data.batching)
    with ForceFloat64():
        if not training:
            return engine.evaluate([batch])[0], 0.0
        engine.forward_backward(batch)
    squares, loss, _ = engine.reduce_scalars(False).tolist()
    return loss / _targets(), norm_of(squares)


def tolerance() -> float:
    """How far loss and norm may differ, relatively: sums in another order, in float64, through all layers.

    Random signs let the error of a sum grow with the root of its length. The longest sum of a token is over the
    vocabulary, and about 12 of them follow each other in a block, forward and backward; the factor 100 is for weights that
    are far larger than those of a trained model, which magnify from layer to layer.
    """
    return 100 * 2.0**-52 * math.sqrt(VOCABULARY * 12 * LAYERS * 2)


def outcomes(family: str, directory: Path) -> Iterator[tuple[str, Outcome]]:
    """(batching, what became of it) of `family`; its config.json is written into `directory`."""
    expected, failure = None, ""
    try:
        configs = list(tiny_configs(family))
    except Exception as error:  # whatever a family's config may raise
        configs, failure = [], _line(error)
    for config in configs:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "config.json").write_text(json.dumps(config))
            expected = alone(directory)
            if all(map(math.isfinite, expected)):
                break
            expected, failure = None, failure or f"its loss is {expected}"
        except Exception as error:  # whatever a family's code may raise
            expected, failure = None, failure or _line(error)
    if expected is None:
        yield from ((batching, Outcome("not built", failure)) for batching in BATCHINGS)
        return
    training = True
    for batching in BATCHINGS:
        found = _outcome(directory, batching, expected, training)
        if found.verdict == "differs" and training and expected != alone(directory, seed=1):
            # what it draws in training is no matter of batching
            training, expected = False, (alone(directory, training=False)[0], 0.0)
            found = _outcome(directory, batching, expected, training)
        yield batching, found


def _outcome(directory: Path, batching: str, expected: tuple[float, float], training: bool) -> Outcome:
    run, note = run_of(directory, batching, "sdpa"), "" if training else "random in training: evaluated"
    try:
        try:
            check_model(build_model(run.model, torch.float64), run)
        except ShardwrightError as error:
            if "attn_implementation" not in error.fix:
                raise
            run, note = run_of(directory, batching, "eager"), f"eager{note and ', '}{note}"
            check_model(build_model(run.model, torch.float64), run)
        found = ours(run, training)
    except ShardwrightError as error:
        return Outcome("refused", f"{error.what} {error.why}".strip())
    except Exception as error:  # whatever a family's code may raise
        return Outcome("crashes", _line(error))
    off = max(abs(a - b) / max(abs(b), 1.0) for a, b in zip(found, expected))
    if off <= tolerance():
        return Outcome("equal", note)
    if off <= FLOAT32:
        return Outcome("equal", f"{note}{note and ', '}rounds to float32 inside")
    return Outcome("differs", f"{off:.1e}")


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def survey(families: list[str]) -> Iterator[tuple[str, dict[str, Outcome]]]:
    """(family, batching -> what became of it), in this process."""
    quiet_transformers()
    warnings.simplefilter("ignore")
    with connect("cpu", 600, 1), tempfile.TemporaryDirectory() as place:
        for family in families:
            yield family, dict(outcomes(family, Path(place) / family))
            gc.collect()


def in_groups(families: list[str]) -> Iterator[tuple[str, dict[str, Outcome]]]:
    """The same, of some families at a time in a process of their own."""
    left = list(families)
    while left:
        group = left[:GROUP]
        command = [sys.executable, __file__, "--json", *group]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
            assert child.stdout is not None
            for line in child.stdout:
                family, found = json.loads(line)
                left.remove(family)
                yield family, {batching: Outcome(**outcome) for batching, outcome in found.items()}
        if group[-1] in left and child.returncode < 0:  # the system ended it, for memory as a rule
            family = next(family for family in group if family in left)
            left.remove(family)
            ended = Outcome("not built", f"its process was ended by signal {-child.returncode}: too large")
            yield family, dict.fromkeys(BATCHINGS, ended)
        elif group[-1] in left:
            raise SystemExit(f"The survey of {left[0]} ended with {child.returncode}.")


def page(found: dict[str, dict[str, Outcome]]) -> str:
    """docs/families.md."""
    import transformers

    counts = {b: sum(own[b].verdict == "equal" for own in found.values()) for b in BATCHINGS}
    lines = [
        "# Families",
        "",
        f"Causal families of Transformers {transformers.__version__}, {len(found)} of them, built tiny with random weights."
        " Three documents are trained in one microbatch. Loss and gradient norm in float64 are compared with Transformers "
        f"alone, which runs each document by itself with eager attention; they are equal to {tolerance():.0e}. Encoders are "
        "built with `is_decoder: true`. Made by `python benchmarks/families.py --write`.",
        "",
        f"Equal under pad: {counts['pad']}, bucket: {counts['bucket']}, pack: {counts['pack']}. `refused`: the gate before a "
        "run says so, with the reason below the table. `not built`: Transformers itself cannot build or run such a "
        "small model of that family (reason below). `eager`: the family needs `model.attn_implementation: eager`.",
        "",
        "| family | pad | bucket | pack |",
        "|---|---|---|---|",
    ]
    if missing := [family for family in causal_families() if family not in found]:
        lines[4:4] = [f"Not run yet: {', '.join(missing)}.", ""]
    reasons: dict[str, int] = {}
    for family, own in found.items():
        cells = []
        for batching in BATCHINGS:
            outcome = own[batching]
            if outcome.verdict == "equal":
                cells.append(f"equal{f' ({outcome.reason})' if outcome.reason else ''}")
                continue
            reason = re.sub(
                r"\b[A-Z]\w+(For\w+|LMHeadModel|Config|Model)\b",
                lambda name: "the model" if name.start() else "The model",
                outcome.reason,
            )
            number = reasons.setdefault(f"{outcome.verdict}: {reason}", len(reasons) + 1)
            cells.append(f"{outcome.verdict} [{number}]")
        lines.append(f"| {family} | {' | '.join(cells)} |")
    lines += ["", *(f"{number}. {reason}" for reason, number in reasons.items()), ""]
    return "\n".join(lines)


def causal_families() -> list[str]:
    """Every `model_type` that Transformers has a causal language model for."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("families", nargs="*")
    parser.add_argument("--write", action="store_true", help="write docs/families.md")
    parser.add_argument("--json", action="store_true", help="one line of JSON a family, in this process")
    asked = parser.parse_args()
    families = asked.families or causal_families()
    found = {}
    for family, own in survey(families) if asked.json else in_groups(families):
        found[family] = own
        if asked.json:
            print(json.dumps([family, {b: asdict(o) for b, o in own.items()}]), flush=True)
        else:
            each = {f"{o.verdict} {o.reason}".strip() for o in own.values()}
            text = [f"{b}: {o.verdict} {o.reason}".strip() for b, o in own.items()]
            print(f"{family}: {each.pop() if len(each) == 1 else '; '.join(text)}", flush=True)
    if asked.write:
        PAGE.write_text(page(found), encoding="utf-8")
    bad = [o for own in found.values() for o in own.values() if o.verdict in ("differs", "crashes")]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

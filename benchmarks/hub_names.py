"""Weights of every family of Transformers that writes text, tiny: read and written here as Transformers reads and writes them.

For each family: a random model is saved by Transformers, read by `from_pretrained` and here (bit for bit), and both are saved
again (names and bits); then a new model is saved here (names).

    python benchmarks/hub_names.py                 # all, line by line, and a count at the end
    python benchmarks/hub_names.py qwen3_moe opt   # these
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from shardwright.config.schema import Model
from shardwright.errors import ShardwrightError
from shardwright.export import save_pretrained
from shardwright.models import build_model, materialise
from shardwright.models.build import quiet_transformers

MOST_PARAMETERS = 20_000_000
SIZES: tuple[tuple[str, int], ...] = (
    (r"vocab_size.*", 199),
    (r"(hidden_size|d_model|n_embd|embed_dim|embedding_size|emb_dim|dim|word_embed_proj_dim)", 32),
    (r"(moe_|shared_|expert_).*(intermediate|hidden)_size", 16),
    (r"(intermediate_size|ffn_dim|ffn_hidden_size|d_ff|(en|de)coder_ffn_dim)", 48),
    (r"(num_hidden_layers|n_layers?|num_layers|decoder_layers)", 2),
    (r"(encoder_layers|depth)", 1),
    (r"(num_attention_heads|n_heads?|num_heads|(en|de)coder_attention_heads)", 4),
    (r"(num_key_value_heads|linear_num_(key|value)_heads|num_experts_per_tok(en)?|moe_(k|topk)|top_k)", 2),
    (r"(num_experts|num_local_experts|n_routed_experts|moe_num_experts|rotary_dim)", 4),
    (r"(head_dim|d_kv|(kv|q)_lora_rank|qk_(no|)(p|r)ope_head_dim|v_head_dim|.*state_size|laurel_rank)", 8),
    (r"(n_group|topk_group|n_shared_experts|first_k_dense_replace)", 1),
    (r"(max_position_embeddings|n_positions|max_seq_len)", 64),
    (r".*token_(id|index)", 0),
)


def main() -> None:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    chosen = parser.parse_args().families
    quiet_transformers()
    kinds: dict[str, Any] = {}
    for auto in (AutoModelForImageTextToText, AutoModelForCausalLM):
        kinds |= {config.model_type: auto for config in auto._model_mapping}
    found: Counter[str] = Counter()
    for family in chosen or sorted(kinds):
        verdict, detail = result(family, kinds[family])
        found[verdict] += 1
        print(f"{family}: {verdict} {detail}".rstrip()[:300], flush=True)
    print(", ".join(f"{verdict} {count}" for verdict, count in found.most_common()))


def result(family: str, auto: Any) -> tuple[str, str]:
    """(equal, differs, refused or not built; what differs or why)."""
    try:
        made = _filled(family, auto)
    except Exception as error:  # a family that cannot be small, in as many ways as there are families
        return "not built", str(error).partition("\n")[0]
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        try:
            made.save_pretrained(root / "hub")
            theirs = auto.from_pretrained(root / "hub", dtype=torch.float32, attn_implementation="eager")
            theirs.save_pretrained(root / "theirs")
        except Exception as error:
            return "not built", f"Transformers: {error}".partition("\n")[0]
        try:
            read = _ours(root, "pretrained")
            _ours(root, "random")
        except ShardwrightError as error:
            return "refused", str(error)
        wrong = _difference(read, theirs.state_dict())
        if wrong and not _difference(read, made.state_dict()):
            wrong = ""  # equal to the files; Transformers gives the tensor its first value again
        wrong = wrong or _difference(_stored(root / "pretrained"), _stored(root / "theirs"))
        names = _stored(root / "random").keys() ^ _stored(root / "hub").keys()
    if wrong or names:
        return "differs", wrong or f"names of a new model: {sorted(names)[:4]}"
    return "equal", ""


def _filled(family: str, auto: Any) -> Any:
    from transformers import CONFIG_MAPPING

    values = CONFIG_MAPPING[family]().to_dict()
    _shrink(values)
    config = CONFIG_MAPPING[family].from_dict(values)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in auto.from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"it has {size:,} parameters")
    torch.manual_seed(0)
    model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.normal_(0, 0.2)
    return model


def _shrink(values: dict[str, Any]) -> None:
    for key, value in list(values.items()):
        if isinstance(value, dict):
            _shrink(value)
        elif key in ("layer_types", "mlp_layer_types", "layers_block_type") and isinstance(value, list):
            values[key] = value[:2]
        elif isinstance(value, int) and not isinstance(value, bool):
            small = next((size for pattern, size in SIZES if re.fullmatch(pattern, key)), value)
            values[key] = min(value, small)
    values.pop("dtype", None)


def _ours(root: Path, init: str) -> dict[str, Tensor]:
    spec = Model.model_validate({"model_name_or_path": str(root / "hub"), "init": init, "attn_implementation": "eager"})
    model = build_model(spec, torch.float32)
    materialise(model, spec, seed=0, device=torch.device("cpu"))
    save_pretrained(model, spec, root / init)
    return dict(model.state_dict())


def _stored(directory: Path) -> dict[str, Tensor]:
    found = {}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


def _difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> str:
    if found.keys() != wanted.keys():
        return f"names: {json.dumps(sorted(found.keys() ^ wanted.keys())[:4])}"
    other = [name for name, value in wanted.items() if not torch.equal(found[name], value)]
    return f"values: {json.dumps(other[:4])}" if other else ""


if __name__ == "__main__":
    main()

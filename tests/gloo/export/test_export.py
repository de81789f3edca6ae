"""Exported directories give the same model in Transformers: covers A29, A65, A70.

The oracle is Transformers' from_pretrained on what was written, against the logits of the writer.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from tests import tolerance
from tests.gloo.engine import run_file
from tests.gloo.ranks import run_ranks
from tests.hub_models import assert_same, filled, stored
from tests.places import EXAMPLES
from tests.tiny_models import spec_of, write_model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from shardwright.errors import ModelError
from shardwright.export import save_pretrained
from shardwright.layout.legality import check_run
from shardwright.models import build_model, find_parts, materialise
from shardwright.models.model_parts import canonical_parameters
from shardwright.train.update import UpdateEngine

pytestmark = [pytest.mark.gloo, pytest.mark.slow]
CPU = torch.device("cpu")
IDS = torch.arange(20).view(2, 10) * 11


def _export(root: str, family: str, shard_bytes: int) -> None:
    spec = spec_of(Path(root) / "source", family, freeze=["*wte*" if family == "gpt2" else "*embed*"])
    model = build_model(spec, torch.float32).eval()
    half = family == "llama"  # what is gathered for compute is bf16 then; the masters must be exported
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if half else None)
    blocks = model.get_submodule(find_parts(model).blocks[0].rpartition(".")[0])
    for number, block in enumerate(blocks):
        blocks[number] = checkpoint_wrapper(block)
        fully_shard(blocks[number], reshard_after_forward=False, mp_policy=policy)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    materialise(model, spec, seed=0, device=CPU)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(IDS).logits.square().mean().backward()
    optimizer.step()
    masters = {name: p.full_tensor() for name, p in canonical_parameters(model).items()}
    with torch.no_grad():
        logits = model(IDS).logits  # and leaves the parameters gathered
    path = save_pretrained(model, spec, Path(root) / "export", max_shard_bytes=shard_bytes)
    loaded = AutoModelForCausalLM.from_pretrained(path).eval()
    assert loaded.dtype == torch.float32
    off = (loaded(IDS).logits - logits.float()).norm() / logits.float().norm()
    assert off <= tolerance.of_blocks(len(blocks), torch.bfloat16 if half else torch.float32)
    for name, value in masters.items():
        assert torch.equal(loaded.get_parameter(name), value), name


@pytest.mark.parametrize(("family", "shard_bytes"), [("llama", 200_000), ("gpt2", 5_000_000_000), ("gemma3", 10**9)])
def test_an_export_of_a_sharded_wrapped_frozen_model_is_the_same_model(
    tmp_path: Path, family: str, shard_bytes: int
) -> None:
    """A29, A65, A70: names without wrappers, frozen weights with their values, tied weights once."""
    source = write_model(tmp_path / "source", family)
    (tmp_path / "source" / "generation_config.json").write_text(GenerationConfig(max_new_tokens=3).to_json_string())
    (tmp_path / "source" / "tokenizer.json").write_text('{"version": "1.0"}')
    run_ranks(_export, 2, str(tmp_path), family, shard_bytes)
    export = tmp_path / "export"
    held = {}
    for file in sorted(export.glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            held |= {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    tied = {"lm_head.weight"} if source.config.tie_word_embeddings else set()
    assert held.keys() == set(source.state_dict()) - tied
    embedding = next(name for name in held if "embed_tokens" in name or "wte" in name)
    assert torch.equal(held[embedding], source.state_dict()[embedding])  # frozen
    assert sum(not torch.equal(held[name], source.state_dict()[name]) for name in held) > 4  # trained
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        if name != "config.json":
            assert (export / name).read_bytes() == (tmp_path / "source" / name).read_bytes()
        else:
            assert json.loads((export / name).read_text()) == json.loads((tmp_path / "source" / name).read_text())
    if shard_bytes < 10**6:
        placed = json.loads((export / "model.safetensors.index.json").read_text())["weight_map"]
        assert placed.keys() == held.keys() and len(set(placed.values())) > 2
    loaded = AutoModelForCausalLM.from_pretrained(export).eval()
    assert loaded.generate(IDS, do_sample=False).shape == (2, 13)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "export"}


def _cannot_write(root: str) -> str:
    spec = spec_of(Path(root) / "source", "llama")
    model = build_model(spec, torch.float32)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    materialise(model, spec, seed=0, device=CPU)
    said = []
    for target in ("source", "notes", "file/export"):
        with pytest.raises(ModelError) as caught:
            save_pretrained(model, spec, Path(root) / target)
        said.append(str(caught.value))
    return "\n".join(said)


def test_every_rank_hears_that_rank_0_cannot_write(tmp_path: Path) -> None:
    write_model(tmp_path / "source", "llama")
    before = {path.name: path.read_bytes() for path in (tmp_path / "source").iterdir()}
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_text("keep me")
    (tmp_path / "file").write_text("")
    first, second = run_ranks(_cannot_write, 2, str(tmp_path))
    assert first == second
    assert "the directory that the model was read from" in first
    assert "files that are not of an earlier export" in first
    assert f"{tmp_path / 'file'} is a file" in first
    assert {path.name: path.read_bytes() for path in (tmp_path / "source").iterdir()} == before
    assert (tmp_path / "notes" / "todo.txt").read_text() == "keep me"


def test_one_process_without_a_group_exports_over_an_earlier_export(tmp_path: Path) -> None:
    write_model(tmp_path / "source", "llama_tied")
    spec = spec_of(tmp_path / "source", "llama_tied", init="random")
    for seed in (1, 2):
        model = build_model(spec, torch.bfloat16)
        materialise(model, spec, seed=seed, device=CPU)
        save_pretrained(model, spec, tmp_path / "export")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    for name, value in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), value) and value.dtype == torch.bfloat16, name
    assert loaded.config.use_cache and not model.config.use_cache


def test_the_chat_template_of_the_data_is_the_one_that_is_exported(tmp_path: Path) -> None:
    """In place of each kind of template that the tokenizer came with; without one the tokenizer's own stays."""
    write_model(tmp_path / "source", "llama_tied")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(EXAMPLES / "tiny" / name, tmp_path / "source" / name)
    config = tmp_path / "source" / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": "old"}))
    template = tmp_path / "chat.jinja"
    template.write_text("{% for message in messages %}[{{ message.content }}]{% endfor %}")
    spec = spec_of(tmp_path / "source", "llama_tied", init="random")
    model = build_model(spec, torch.float32)
    materialise(model, spec, seed=1, device=CPU)

    def rendered(given: str | None) -> str:
        save_pretrained(model, spec, tmp_path / "export", chat_template=given)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
        messages = [{"role": "user", "content": "hello"}]
        return str(tokenizer.apply_chat_template(messages, tokenize=False))

    assert rendered(None) == "old"
    assert rendered(str(template)) == "[hello]"
    (tmp_path / "source" / "chat_template.jinja").write_text("older")
    assert rendered(None) == "older"
    assert rendered(str(template)) == "[hello]"
    assert "chat_template" not in json.loads((tmp_path / "export" / "tokenizer_config.json").read_text())


def _through_layouts(root: str) -> None:
    """Reads files of the hub's names into each layout and writes them again, untrained."""
    for number, (family, layout) in enumerate(LAYOUTS):
        loaded = run_file(str(Path(root) / family), **layout, model__init="pretrained", **FP32)
        engine = UpdateEngine(loaded.run, check_run(loaded, 2), CPU, updates=1)
        save_pretrained(engine.module, loaded.run.model, Path(root) / f"{family}-{number}", max_shard_bytes=20_000)


FP32 = {f"precision__{name}_dtype": "fp32" for name in ("param", "reduce", "master")}
LAYOUTS: tuple[tuple[str, dict[str, object]], ...] = (
    ("qwen3_moe", {"parallelism.data_parallel": "zero3"}),
    ("qwen3_moe", {"parallelism.data_parallel": "ddp", "parallelism.pp_size": 2}),
    ("gemma3", {"parallelism.data_parallel": "ddp", "parallelism.tp_size": 2}),
    ("gemma3", {"parallelism.data_parallel": "zero2"}),
)


def test_files_of_the_hub_pass_through_every_layout_bit_for_bit(tmp_path: Path) -> None:
    """Experts divided and on two stages, a text model divided inside a wrapped one; the oracle is what Transformers wrote."""
    for family in ("qwen3_moe", "gemma3"):
        filled(family).save_pretrained(tmp_path / family)
    run_ranks(_through_layouts, 2, str(tmp_path))
    for number, (family, _) in enumerate(LAYOUTS):
        assert_same(stored(tmp_path / f"{family}-{number}"), stored(tmp_path / family))

"""What an export holds beside weights, and where it may be put: said or refused before training, and then written so.

The oracle is Transformers' loading of what was written.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny_models import spec_of, write_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from shardwright.config.schema import Model
from shardwright.errors import ConfigError, ModelError
from shardwright.export import save_pretrained
from shardwright.export.huggingface import check_export
from shardwright.models import build_model, materialise

ENDS = ("<s>", "</s>", "<|im_end|>")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "source"
    write_model(directory, "llama_tied")
    (directory / "generation_config.json").unlink(missing_ok=True)
    return directory


@pytest.fixture
def place(source: Path, tmp_path: Path) -> Path:
    shutil.copytree(source, tmp_path / "source")
    return tmp_path


def edit(file: Path, **values: Any) -> None:
    held = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(held | values))


def tokenizer(directory: Path, **templates: str) -> None:
    words = {word: number for number, word in enumerate([*ENDS, "a", "b"])}
    inner = Tokenizer(models.WordLevel(words, unk_token="a"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", additional_special_tokens=["<|im_end|>"]
    )
    if templates:
        fast.chat_template = dict(templates)
    fast.save_pretrained(directory)


def checked(place: Path, directory: str = "run/model", **more: Any) -> tuple[str, ...]:
    """Lines of the check before training."""
    spec = spec_of(place / "source", init="random")
    given = {"tokenizer": None, "chat_template": None, "end_tokens": ()} | more
    return check_export(build_model(spec, torch.float32), spec, place / directory, **given)


def exported(place: Path, spec: Model | None = None, **more: Any) -> Path:
    spec = spec or spec_of(place / "source", init="random")
    model: nn.Module = build_model(spec, torch.float32)
    materialise(model, spec, seed=1, device=torch.device("cpu"))
    return save_pretrained(model, spec, place / "export", **more)


def test_sampling_settings_in_the_config_of_an_older_model(place: Path) -> None:
    """They move to generation_config.json, where Transformers looks; where there is one they had no effect."""
    edit(place / "source/config.json", do_sample=True, temperature=0.6, top_p=0.9, eos_token_id=2)
    before = AutoModelForCausalLM.from_pretrained(place / "source").generation_config.to_diff_dict()
    assert checked(place) == (
        "exported in generation_config.json instead of config.json: do_sample, temperature, top_p",
    )
    loaded = AutoModelForCausalLM.from_pretrained(exported(place))
    after = loaded.generation_config.to_diff_dict()
    keys = ("do_sample", "temperature", "top_p", "eos_token_id")
    assert [after.get(key) for key in keys] == [before.get(key) for key in keys] == [True, 0.6, 0.9, 2]
    loaded.save_pretrained(place / "again")  # which Transformers refuses with the settings in config.json
    edit(place / "source/generation_config.json", do_sample=False)
    assert "generation_config.json replaces them" in checked(place)[0]
    assert not AutoModelForCausalLM.from_pretrained(exported(place)).generation_config.do_sample


def test_a_generation_config_that_contradicts_itself_is_exported_as_it_is(place: Path) -> None:
    file = place / "source/generation_config.json"
    edit(file, do_sample=False, temperature=0.7, top_p=1.0)
    (line,) = checked(place)
    assert "sets do_sample false and temperature, which then have no effect" in line
    assert json.loads((exported(place) / file.name).read_text()) == json.loads(file.read_text())
    AutoModelForCausalLM.from_pretrained(place / "export")
    file.write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json cannot be read"):
        checked(place)


@pytest.mark.parametrize(
    ("config", "generation", "ends", "want", "places"),
    [
        (1, 1, (2,), ([1, 2], [1, 2]), "config.json and generation_config.json"),
        ([1, 0], [2], (2,), ([1, 0, 2], [2]), "config.json"),
        (2, 1, (2,), (2, [1, 2]), "generation_config.json"),
        (1, ..., (2,), ([1, 2], [1, 2]), "config.json"),  # Transformers takes them from config.json then
        (None, ..., (2,), (2, 2), "config.json"),
        ([1, 2], 2, (2,), ([1, 2], 2), ""),
        (1, 1, (), (1, 1), ""),
        (1, None, (1, 2), ([1, 2], [1, 2]), "config.json and generation_config.json"),
    ],
)
def test_end_tokens_that_training_teaches_are_added(
    place: Path, config: Any, generation: Any, ends: Any, want: Any, places: str
) -> None:
    edit(place / "source/config.json", eos_token_id=config)
    if generation is not ...:
        edit(place / "source/generation_config.json", eos_token_id=generation)
    lines = checked(place, end_tokens=ends)
    assert [line for line in lines if "end token" in line] == list(lines) and len(lines) == bool(places)
    assert not places or f"added to eos_token_id of {places}:" in lines[0]
    loaded = AutoModelForCausalLM.from_pretrained(exported(place, end_tokens=ends))
    assert (loaded.config.eos_token_id, loaded.generation_config.eos_token_id) == want


def test_files_beside_weights_are_copied_or_named(place: Path) -> None:
    source = place / "source"
    tokenizer(source, default="{{ messages[0]['content'] }}", tool_use="tools")
    assert (source / "additional_chat_templates/tool_use.jinja").is_file()
    for name in (
        "preprocessor_config.json",
        "modeling_own.py",
        "LICENSE",
        "README.md",
        "old.bin",
        "notes.txt",
        ".hidden",
    ):
        (source / name).write_text("{}")
    (source / "onnx").mkdir()
    (source / "onnx/model.onnx").write_text("")
    edit(source / "config.json", auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    (line,) = checked(place)
    assert line == f"not exported from {source}: README.md, notes.txt, onnx/"
    out = exported(place)
    held = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert held == {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja", "preprocessor_config.json", "modeling_own.py", "LICENSE",
    }  # fmt: skip
    assert AutoTokenizer.from_pretrained(out).chat_template == AutoTokenizer.from_pretrained(source).chat_template
    assert json.loads((out / "config.json").read_text())["auto_map"] == {"AutoModelForCausalLM": "modeling_own.Own"}
    exported(place)  # over the one before, with every file that it has
    given = place / "own.jinja"
    given.write_text("own")
    assert "additional_chat_templates/tool_use.jinja" in checked(place, chat_template=str(given))[1]
    assert AutoTokenizer.from_pretrained(exported(place, chat_template=str(given))).chat_template == "own"


def test_the_tokenizer_of_another_directory_and_overrides_of_the_config(place: Path) -> None:
    tokenizer(place / "source")
    tokenizer(place / "other", default="other")
    spec = spec_of(
        place / "source",
        init="random",
        config_overrides={"rms_norm_eps": 0.5},
        tokenizer_name_or_path=str(place / "other"),
    )
    assert AutoTokenizer.from_pretrained(exported(place, spec)).chat_template == "other"
    loaded = AutoModelForCausalLM.from_pretrained(place / "export")
    assert loaded.config.rms_norm_eps == 0.5 and loaded.config.dtype == torch.float32
    shutil.rmtree(place / "export")
    assert AutoTokenizer.from_pretrained(exported(place, tokenizer=place / "other")).chat_template == "other"


def test_a_place_that_an_export_may_not_take_is_refused_before_training(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(directory: str, match: str, **more: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            checked(place, directory, **more)

    refused("source", "the directory that the model was read from")
    (place / "link").symlink_to(place / "source")
    refused("link", "the directory that the model was read from")
    for name, to in (("dangling", "nowhere"), ("linked", "empty")):
        (place / name).symlink_to(place / to)
    (place / "empty").mkdir()
    assert checked(place, "empty") == ()
    refused("linked", "it is a link, to .*empty")
    refused("dangling", "it is a link")
    refused(".", "it holds .*source, which the run reads")
    tokenizer(place / "run/tokenizer")
    refused("run", "it holds .*tokenizer", tokenizer=place / "run/tokenizer")
    shutil.copytree(exported(place), place / "mine")
    assert checked(place, "mine") == ()
    (place / "mine/results.csv").write_text("")
    refused("mine", r"files that are not of an earlier export: results\.csv")
    (place / "file").write_text("")
    refused("file", "it is a file")
    refused("file/run/model", "file is a file")
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != place)
    refused("new/model", f"{place} is not writable")

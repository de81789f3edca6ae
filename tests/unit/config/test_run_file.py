"""The run file: what is read, what is refused, and where values come from. Covers A123 and A124."""

# ruff: noqa: E501 (messages stand as they are printed)

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.places import ROOT
from tests.started import LIMIT

import shardwright
from shardwright.config.load import Loaded, keys, load_run_file, parse_overrides, sections
from shardwright.config.schema import RunFile, Source
from shardwright.errors import ConfigError
from shardwright.layout.axes import AXES

MINIMAL = """\
model:
  model_name_or_path: ./model
data:
  train: [data/*.jsonl]
training:
  max_steps: 10
  global_batch_size: 8
"""


def load(tmp_path: Path, text: str, **overrides: Any) -> Loaded:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return load_run_file(path, {key.replace("__", "."): v for key, v in overrides.items()}, name="run.yaml")


def test_sources_with_weights_are_printed_as_they_are_read(tmp_path: Path) -> None:
    text = MINIMAL.replace("[data/*.jsonl]", "[a.jsonl, {path: b, weight: 0.5}]")
    found = load(tmp_path, text)
    assert load(tmp_path, found.to_yaml()).run == found.run
    assert found.run.data.train == ["a.jsonl", Source(path="b", weight=0.5)]


def test_values_and_their_origin(tmp_path: Path) -> None:
    found = load(tmp_path, MINIMAL + "  learning_rate: 1e-4\n", training__max_steps=7)
    assert found.run.training.learning_rate == 1e-4 and found.run.training.max_steps == 7
    assert found.origin["training.max_steps"] == "--training.max_steps"
    assert found.origin["training.global_batch_size"] == "run.yaml:7"
    assert found.origin["training.learning_rate"] == "run.yaml:8"
    assert found.origin["parallelism.data_parallel"] == "default"
    assert set(found.origin) == set(keys())
    printed = found.to_yaml(origins=True).splitlines()
    assert next(line for line in printed if "max_steps" in line).split() == [
        "max_steps:",
        "7",
        "#",
        "--training.max_steps",
    ]
    assert Loaded.from_json(found.to_json()) == found
    changed = found.replaced({"training.max_steps": 3}, "check")
    assert changed.run.training.max_steps == 3 and changed.origin["training.max_steps"] == "check"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "run.yaml is empty"),
        ("- a\n", "the run file must be a mapping"),
        ("model: [\n", "run.yaml is not YAML"),
        (MINIMAL + "  learning_rat: 1\n", "run.yaml:8: `training.learning_rat` is not a key of the run file. Did you mean `training.learning_rate`?"),
        (MINIMAL + "  data_parallel: ddp\n", "run.yaml:8: `training.data_parallel` is not a key of the run file. That key stands in another section: `parallelism.data_parallel`."),
        (MINIMAL + "data_parallel: ddp\n", "run.yaml:8: `data_parallel` is not a key of the run file. It belongs into a section: `parallelism.data_parallel`."),
        (MINIMAL + "traning:\n  seed: 1\n", "run.yaml:8: `traning` is not a key of the run file. Did you mean `training`?"),
        (MINIMAL + "  max_steps: 9\n", "run.yaml:8: `training.max_steps` is given twice."),
        (MINIMAL + "data:\n  train: [b]\n", "run.yaml:8: `data` is given twice."),
        (MINIMAL + "  optimizer_kwargs: {momentum: 0.9, nesterov: true, momentum: 0.1}\n", "run.yaml:8: `training.optimizer_kwargs.momentum` is given twice."),
        (MINIMAL + "  seed: '1'\n", "run.yaml:8: `training.seed` = '1': input should be a valid integer."),
        (MINIMAL + "  seed: true\n", "`training.seed` = True: input should be a valid integer"),
        (MINIMAL + "  seed: 1.0\n", "`training.seed` = 1.0: input should be a valid integer"),
        (MINIMAL + "  seed: 010\n", "`training.seed` = '010': input should be a valid integer"),
        (MINIMAL + "  learning_rate: true\n", "`training.learning_rate` = True: input should be a valid number"),
        (MINIMAL + "  learning_rate: 0\n", "`training.learning_rate` = 0: input should be greater than 0"),
        (MINIMAL + "  learning_rate: .inf\n", "`training.learning_rate` = inf: input should be a finite number"),
        (MINIMAL + "  learning_rate: .nan\n", "`training.learning_rate` = nan: input should be a finite number"),
        (MINIMAL + "  on_non_finite: ignore\n", "input should be 'stop' or 'skip'. It means: If the loss or a gradient"),
        (MINIMAL + "memory: {compile: yes}\n", "`memory.compile` = 'yes': input should be a valid boolean"),
        (MINIMAL + "memory: {compile: 1}\n", "`memory.compile` = 1: input should be a valid boolean"),
        (MINIMAL + "parallelism: {dp_shard_size: 0}\n", "-1 (the rest) or at least 1"),
        (MINIMAL + "parallelism: {dp_shard_size: -2}\n", "-1 (the rest) or at least 1"),
        (MINIMAL + "parallelism: {tp_size: 0}\n", "`parallelism.tp_size` = 0: input should be greater than or equal to 1"),
        (MINIMAL + "parallelism: {data_parallel: no-shard}\n", "'ddp', 'zero1', 'zero2' or 'zero3'"),
        (MINIMAL.replace("  global_batch_size: 8\n", ""), "`training.global_batch_size` is missing. This key has no default. Add it under `training:`."),
        ("data: {train: [a]}\ntraining: {max_steps: 1, global_batch_size: 1}\n", "`model` is missing"),
        (MINIMAL.replace("[data/*.jsonl]", "data.jsonl"), "`data.train` = 'data.jsonl': input should be a valid list"),
        (MINIMAL.replace("[data/*.jsonl]", "[]"), "`data.train` = []: list should have at least 1 item"),
        (MINIMAL.replace("[data/*.jsonl]", "[{path: a, wieght: 2}]"), "`data.train[0].wieght` is not a key of a source. Did you mean `weight`?"),
        (MINIMAL.replace("[data/*.jsonl]", "[a, {weight: 2}]"), "`data.train[1].path` is missing"),
        (MINIMAL.replace("[data/*.jsonl]", "[{path: a, weight: 0}]"), "`data.train[0].weight` = 0: input should be greater than 0"),
        ("model: ./model\n" + MINIMAL.split("\n", 2)[2], "`model` = './model': input should be a valid dictionary"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """A123: a name that is not known is refused, with the names that are; so is every wrong type."""
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(tmp_path, text)


def test_several_faults_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, MINIMAL + "  seed: a\n  warmup_steps: b\n")
    assert len(str(caught.value).splitlines()) == 2


def test_aliases(tmp_path: Path) -> None:
    assert load(tmp_path, MINIMAL + "parallelism: {data_parallel: fsdp2}\n").run.parallelism.data_parallel == "zero3"


def test_overrides() -> None:
    words = ["--training.max_steps", "5", "--training.learning_rate=1e-4", "--parallelism.dp_shard_size", "-1",
             "--memory.compile", "true", "--data.train", "[a.jsonl, b.jsonl]", "--training.max_grad_norm", "null"]  # fmt: skip
    assert parse_overrides(words) == {
        "training.max_steps": 5,
        "training.learning_rate": 1e-4,
        "parallelism.dp_shard_size": -1,
        "memory.compile": True,
        "data.train": ["a.jsonl", "b.jsonl"],
        "training.max_grad_norm": None,
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-steps", "5"], "`--max-steps` is no option and no override. Overrides read --section.key value. Did you mean `max_steps`?"),
        (["train.yaml"], "`train.yaml` is no option"),
        (["--training.max_steps"], "`--training.max_steps` has no value"),
        (["--training.max_steps", "--training.seed", "1"], "`--training.max_steps` has no value"),
        (["--training.seed", "1", "--training.seed=2"], "`--training.seed` is given twice"),
        (["--data.train", "[a"], "is not a YAML value"),
    ],
)  # fmt: skip
def test_overrides_that_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_overrides(words)


@pytest.mark.parametrize("key", ["training.learning_rat", "training.data_parallel", "max_steps", "a.b.c"])
def test_overrides_of_unknown_keys(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=f"--{key}: `{key}` is not a key"):
        load(tmp_path, MINIMAL, **{key: 1})


text = st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=12)
scalar = st.one_of(
    st.booleans(), st.integers(-(10**12), 10**12), st.floats(allow_nan=False, allow_infinity=False), text
)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(text.filter(bool), st.one_of(scalar, st.lists(scalar, max_size=3)), max_size=4), text)
def test_the_printed_run_file_reads_back(values: dict[str, Any], path: str) -> None:
    """What is saved with the run is the run: strings such as 1e-4, on or 010 stay strings."""
    found = load_run_file(
        None,
        {
            "model.model_name_or_path": path,
            "model.kwargs": values,
            "data.train": ["1e-4", "0x10", "null", "~", "yes", path],
            "training.max_steps": 3,
            "training.global_batch_size": 8,
            "training.learning_rate": 1e-07,
        },
    )
    for origins in (False, True):
        node = found.to_yaml(origins)
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "run.yaml"
            file.write_text(node, encoding="utf-8")
            assert load_run_file(file).run == found.run


def test_every_key_is_read_somewhere() -> None:
    """A124: no key of the schema is only parsed. (Effects are tested where the key is used.)"""
    root = Path(shardwright.__file__).parent
    source = "\n".join(p.read_text() for p in root.rglob("*.py") if p.parent.name != "config")
    unread = [key for key in keys() if not re.search(rf"\.{key.split('.')[1]}\b(?!\s*=[^=])", source)]
    by_registry = {f"parallelism.{axis.key}" for axis in AXES.values()}  # `resolve_axes` reads sizes by these names
    assert set(unread) <= by_registry, unread


def test_every_key_has_a_section_and_defaults_are_valid() -> None:
    assert list(sections()) == list(RunFile.model_fields)
    assert len(keys()) == len(set(keys())) > 50
    assert yaml.safe_load(load_run_file(None, MINIMAL_VALUES).to_yaml())["parallelism"]["data_parallel"] == "zero3"


MINIMAL_VALUES = {
    "model.model_name_or_path": "m",
    "data.train": ["a"],
    "training.max_steps": 1,
    "training.global_batch_size": 1,
}


def shardwright_command(*words: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from shardwright.cli import main\ntry: main()\nfinally: print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules], file=sys.stderr)"
    return subprocess.run(
        [sys.executable, "-c", code, *words], cwd=ROOT, env={"PYTHONPATH": "src", "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=LIMIT,
    )  # fmt: skip


@pytest.mark.parametrize(
    "words", [["schema"], ["--help"], ["train", "--help"], ["train", "examples/tiny.yaml", "--print-config"]]
)
def test_quick_verbs_import_no_torch(words: list[str]) -> None:
    done = shardwright_command(*words)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip().endswith("[]"), done.stderr
    assert done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "nowhere.yaml"], "nowhere.yaml cannot be read: No such file or directory."),
        (["train", "examples/tiny.yaml", "--training.sed", "1"], "Did you mean `training.seed`?"),
        (["train", "examples/tiny.yaml", "--nproc-per-node", "0"], "is not a number of ranks"),
        (["trian"], "No such command 'trian'"),
        (["train", "examples/tiny.yaml", "extra"], "`extra` is no option and no override"),
    ],
)  # fmt: skip
def test_usage_errors_end_with_2(words: list[str], message: str) -> None:
    done = shardwright_command(*words)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.replace("│", " ").split()), done.stderr
    assert "Traceback" not in done.stderr

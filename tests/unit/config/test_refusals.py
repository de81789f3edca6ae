"""What can be known from the run file is refused by every verb with exit code 2, before a process is started."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_models import FAMILIES
from typer.testing import CliRunner

from shardwright.cli import app
from shardwright.config.load import keys, load_run_file
from shardwright.errors import ConfigError, ExitCode, ShardwrightError
from shardwright.layout.legality import check_settings, effect_rules, idle_keys, notices

RANKS = ["train", "check", "bench", "drill"]
EVERY = [*RANKS, "inspect", "plan"]
REFUSED: list[tuple[list[str], list[str], str]] = [
    (EVERY, ["--training.no_decay", "['*x']"], "has no effect here: training.weight_decay is 0"),
    (EVERY, ["--training.num_train_epochs", "1.0"], "are both set"),
    (
        ["train", "drill", "inspect", "plan"],
        ["--parallelism.pp_schedule", "gpipe"],
        "has no effect here: pp_size is 1",
    ),
    (EVERY, ["--precision.param_dtype", "fp64"], "is wider than precision.master_dtype"),
    (
        EVERY,
        ["--checkpoint.keep_every", "4", "--checkpoint.save_total_limit", "2"],
        "only the last update is saved",
    ),
    (RANKS, ["--training.optimizer", "adamww"], "training.optimizer = 'adamww' is not known"),
    (RANKS, ["--training.optimizer_kwargs", "{wrong: 1}"], "unexpected keyword argument 'wrong'"),
    (RANKS, ["--training.loss", "nowhere:loss"], "cannot be imported"),
    (RANKS, ["--training.lr_scheduler_type", "sometimes"], "sometimes"),
    (["train", "bench", "drill"], ["--training.global_batch_size", "7"], "is not a multiple of"),
    (RANKS, ["--hardware.device", "cuda"], "torch finds no CUDA device"),
    (RANKS, ["--memory.cpu_offload", "params"], "This run is on the CPU"),
    (
        ["train", "bench", "drill"],
        ["--checkpoint.output_dir", "FILE/run"],
        "is not a directory. Results would be lost",
    ),
    (["bench"], ["--vs", "pears"], "--vs pears is not known"),
    (
        ["bench"],
        ["--vs", "peers", "--data.batching", "pack"],
        "--vs peers cannot be run with data.batching pack.",
    ),
    (
        ["bench"],
        ["--vs", "peers", "--training.optimizer", "sgd"],
        "--vs peers cannot be run with training.optimizer sgd.",
    ),
    (["bench"], ["--vs", "peers", "--training.loss", "tests.own_losses:token_mean"], "with training.loss"),
    (
        ["bench"],
        ["--vs", "peers", "--training.optimizer_kwargs", "{amsgrad: true}"],
        "with training.optimizer_kwargs.",
    ),
    (["bench"], ["--vs", "peers", "--layouts", "ddp+tp2"], "no peer for ddp+tp2"),
    (
        ["bench"],
        ["--vs", "peers", "--data.train", "[WEIGHTED]"],
        "--vs peers cannot be run with targets that have weights",
    ),
    (["bench"], ["--device", "h101-sxm-80gb"], "h100-sxm-80gb"),
    (["bench"], ["--trace", "FILE/traces"], "--trace FILE/traces: FILE is not a directory"),
    (["bench", "check"], ["--layouts", "zeroo3"], "zero3"),
    (["bench", "check"], ["--layouts", "ddp+tp3"], "the world size is 2"),
    (["check"], ["--dtype", "fp23"], "--dtype fp23 is not known"),
    (["check"], ["--plant", "nothing"], "nothing"),
    (["drill"], ["--trials", "kil"], "Did you mean `kill`"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file of a tiny model, data with and without weights, and a plain file where a directory is asked for."""
    place = tmp_path_factory.mktemp("refusals")
    FAMILIES["llama"]().save_pretrained(place / "model")
    rows = [{"input_ids": [1 + n % 7] * (4 + n)} for n in range(8)]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    weighted = [{**row, "loss_weights": [0.5] * len(row["input_ids"])} for row in rows]
    (place / "weighted.jsonl").write_text("".join(json.dumps(row) + "\n" for row in weighted))
    (place / "file").write_text("not a directory")
    (place / "run.yaml").write_text(
        f"model: {{model_name_or_path: {place / 'model'}, init: random}}\n"
        f"data: {{train: [{place / 'rows.jsonl'}], max_length: 16, num_proc: 1}}\n"
        "training: {max_steps: 40, global_batch_size: 4}\n"
        f"checkpoint: {{output_dir: {place / 'run'}}}\n"
    )
    return place


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError(f"a process was started: {arguments}")

    monkeypatch.setattr(subprocess, "Popen", refuse)


def refusal(arguments: list[str]) -> ShardwrightError:
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, ShardwrightError), (result.exception, result.output)
    return result.exception


@pytest.mark.parametrize(
    ("verb", "change", "message"),
    [(verb, change, message) for verbs, change, message in REFUSED for verb in verbs],
)
def test_a_run_file_is_refused_before_work(
    verb: str, change: list[str], message: str, place: Path, no_process: None
) -> None:
    file = str(place / "file")
    named = {"FILE": file, "WEIGHTED": str(place / "weighted.jsonl")}
    for word, name in named.items():
        change, message = [part.replace(word, name) for part in change], message.replace(word, name)
    ranks = ["--nproc-per-node", "2"] if verb in RANKS else ["--devices", "2"] if verb == "plan" else []
    error = refusal([verb, str(place / "run.yaml"), *ranks, *change])
    assert error.exit_code == ExitCode.USAGE
    assert message in str(error)
    assert not (place / "run").exists()


def test_places_that_cannot_be_written_are_refused_first(place: Path, no_process: None) -> None:
    """doctor measures for a minute, and report reads everything, before they write."""
    inside = str(place / "file" / "x")
    assert "is not a directory" in str(refusal(["doctor", "--output", inside]))
    assert "is a directory" in str(refusal(["doctor", "--output", str(place)]))
    assert "is not a directory" in str(refusal(["report", str(place), "--output", inside]))


ALWAYS = """
    model.model_name_or_path model.init model.tokenizer_name_or_path model.freeze
    data.train data.validation data.format data.text_column data.chat_template data.assistant_only_loss
    data.completion_only_loss data.max_length data.overlong data.append_eos data.batching data.streaming data.shuffle
    data.cache_dir
    training.max_steps training.num_train_epochs training.global_batch_size training.per_device_train_batch_size training.loss
    training.learning_rate training.optimizer training.optimizer_kwargs training.weight_decay training.lr_scheduler_type
    training.max_grad_norm training.seed training.on_non_finite training.on_spike
    parallelism.data_parallel parallelism.dp_replicate_size parallelism.dp_shard_size parallelism.tp_size parallelism.cp_size
    parallelism.pp_size
    precision.param_dtype precision.reduce_dtype precision.master_dtype
    memory.activation_checkpointing memory.cpu_offload memory.compile memory.loss_chunk_tokens
    checkpoint.output_dir checkpoint.storage checkpoint.save_steps checkpoint.save_total_limit checkpoint.keep_best
    checkpoint.on_save_error checkpoint.async_save checkpoint.resume checkpoint.export_hf
    hardware.device hardware.threads_per_rank hardware.timeout_seconds hardware.grace_seconds
    hardware.numa_binding hardware.garbage_collection_steps
    logging.log_steps logging.report_to
"""
"""Keys that have an effect in every run, or whose refusal stands elsewhere: of axes (`resolve_axes`), of a device
(`check_device`), of formats (`data/formats.py`), of checkpoints (`_check_checkpoint`); async_save has a notice."""


def run(**options: Any) -> Any:
    values = {
        "model.model_name_or_path": "m",
        "data.train": ["a"],
        "training.max_steps": 10,
        "training.global_batch_size": 8,
        **{key.replace("__", "."): value for key, value in options.items()},
    }
    return load_run_file(None, {key: value for key, value in values.items() if value is not ...})


def test_every_key_always_has_an_effect_or_says_when_it_has_none() -> None:
    """A new key of the schema is either listed above or has a rule; no key is both."""
    ruled = {key for rule in effect_rules(run().run) for key in rule.keys}
    assert ruled | set(ALWAYS.split()) == set(keys())
    assert not ruled & set(ALWAYS.split())


ZERO2 = {"parallelism__data_parallel": "zero2"}


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"parallelism__data_parallel": "ddp", "parallelism__unit": 2}, "parallelism.unit"),
        ({"parallelism__data_parallel": "ddp", "parallelism__prefetch": 2}, "parallelism.prefetch"),
        (
            {"parallelism__data_parallel": "zero2", "parallelism__reshard_after_forward": True},
            "parallelism.reshard_after_forward",
        ),
        ({"parallelism__bucket_bytes": 100}, "parallelism.bucket_bytes"),
        ({"parallelism__sequence_parallel": True}, "parallelism.sequence_parallel"),
        ({"parallelism__tp_plan": {"a": "b"}}, "parallelism.tp_plan"),
        ({"parallelism__cp_attention": "ring"}, "parallelism.cp_attention"),
        ({"parallelism__cp_load_balance": True}, "parallelism.cp_load_balance"),
        ({"parallelism__pp_schedule": "1f1b"}, "parallelism.pp_schedule"),
        ({"training__optimizer": "sgd", "training__adam_beta1": 0.8}, "training.adam_beta1"),
        ({"training__optimizer": "muon", "training__adam_epsilon": 1e-6}, "training.adam_epsilon"),
        ({"training__eval_steps": 2}, "training.eval_steps"),
        ({"training__per_device_eval_batch_size": 2}, "training.per_device_eval_batch_size"),
        ({"data__validation": ["b"], "training__until_eval_loss": 2.0}, "training.until_eval_loss"),
        ({"checkpoint__save_total_limit": 2, "checkpoint__keep_every": 4}, "checkpoint.keep_every"),
        ({"checkpoint__save_steps": 2, "checkpoint__keep_every": 4}, "checkpoint.keep_every"),
        ({"checkpoint__copies": 2}, "checkpoint.copies"),
        ({"checkpoint__async_when_busy": "skip"}, "checkpoint.async_when_busy"),
        ({"checkpoint__resume": "never", "checkpoint__partial": ["*"]}, "checkpoint.partial"),
        ({"data__bucket_updates": 2}, "data.bucket_updates"),
        ({"data__packing_strategy": "wrapped"}, "data.packing_strategy"),
        ({"data__stream_window": 5}, "data.stream_window"),
        ({"data__drop_last": True}, "data.drop_last"),
        ({"model__kwargs": {"a": 1}}, "model.kwargs"),
        ({"model__model_name_or_path": "a:b", "model__config_overrides": {"a": 1}}, "model.config_overrides"),
        ({"training__max_steps": 2, "logging__profile_steps": 1}, "logging.profile_steps"),
    ],
)
def test_a_key_without_effect_is_refused(options: dict[str, Any], key: str) -> None:
    loaded = run(**options)
    assert key in idle_keys(loaded)
    with pytest.raises(ConfigError, match="has no effect here"):
        check_settings(loaded)


def test_steps_beyond_the_end_are_said() -> None:
    found = notices(run(checkpoint__save_steps=11, logging__profile_steps=11, checkpoint__async_save=True).run)
    assert [line.split(":")[0] for line in found] == [
        "checkpoint.save_steps 11 is more than training.max_steps 10",
        "logging.profile_steps 11 is more than training.max_steps 10",
    ]
    assert notices(run(checkpoint__save_steps=10, checkpoint__async_save=True).run) == []
    assert "Set checkpoint.save_steps" in notices(run(checkpoint__async_save=True).run)[0]


def test_a_resolved_file_can_be_run_again(tmp_path: Path) -> None:
    """config.yaml of a run writes every default out; what it asks for is what the run asked for."""
    loaded = run()
    (tmp_path / "config.yaml").write_text(loaded.to_yaml(origins=True))
    again = load_run_file(tmp_path / "config.yaml")
    check_settings(again)
    assert again.run == loaded.run

"""`shardwright inspect`: rows, marks and figures against ones written down by hand. A120."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tests.places import EXAMPLES
from tests.started import LIMIT, environment

from shardwright.config.load import Loaded, load_run_file
from shardwright.data.loader import Loader
from shardwright.data.prepare import make_order, prepare
from shardwright.errors import ConfigError
from shardwright.tools.inspect.batching import measure
from shardwright.tools.inspect.verb import attended_length, bins, run_inspect

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def talk(question: str, answer: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer} | more]}


def loaded(directory: Path, records: list[dict[str, Any]], **changes: Any) -> Loaded:
    """A run file over `records` with the tiny tokenizer: a token is a byte, and `<eos>`."""
    (directory / "template.jinja").write_text(TEMPLATE)
    (directory / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    values = {
        "model.model_name_or_path": str(EXAMPLES / "tiny"),
        "data.train": [str(directory / "a.jsonl")],
        "data.max_length": 16,
        "data.num_proc": 1,
        "data.shuffle": False,
        "training.num_train_epochs": 1,
        "training.global_batch_size": 2,
        "training.per_device_train_batch_size": 2,
        "checkpoint.output_dir": str(directory / "runs" / "a"),
    }
    if "messages" in records[0]:
        values["data.chat_template"] = str(directory / "template.jinja")
    return load_run_file(None, values | {key.replace("__", "."): value for key, value in changes.items()})


def printed(run: Loaded, terminal: bool = False, **options: Any) -> str:
    file = io.StringIO()
    assert run_inspect(run, Console(file=file, force_terminal=terminal, width=200), **options) == 0
    return file.getvalue()


def test_marks_show_what_is_trained(tmp_path: Path) -> None:
    """Two documents of 10 tokens in rows of 21: the answers and their ends are trained, the second at half weight."""
    records = [talk("hi", "é"), talk("a", "b\nc", loss_weight=0.5)]
    run = loaded(tmp_path, records, data__max_length=21, data__batching="pack")
    assert printed(run, row=0).splitlines()[1:] == [
        "Row 0: 2 documents, 20 of 21 slots filled",
        f"-- {tmp_path}/a.jsonl:1: 10 tokens, 3 trained --",
        "u:hi<eos>a:[+é<eos>+]",
        f"-- {tmp_path}/a.jsonl:2: 10 tokens, 4 trained --",
        "u:a<eos>a:[+0.5:b↵",
        "c<eos>+]",
        "-- 1 padding --",
    ]
    colour = printed(run, terminal=True, row=0)
    assert "\x1b[30;42mé\x1b[0m" in colour and "\x1b[2mu:hi\x1b[0m" in colour and "×0.5" in colour
    assert "[+" not in colour


def test_the_report_as_json_is_what_the_loader_gives(tmp_path: Path) -> None:
    records = [talk("hi", "yes"), talk("a", "b"), talk("more to say", "than fits"), talk("x", "")]
    records[3]["messages"].pop()
    run = loaded(tmp_path, records, data__batching="pack")
    report = json.loads(printed(run, as_json=True, samples=9))
    assert report["counts"]["masked_documents"] == 1 and report["counts"]["truncated_documents"] == 1
    assert any("1 of 4 documents have no trained token" in line for line in report["notices"])
    prepared = prepare(run.run)
    assert prepared is not None
    place = {"data_rank": 0, "data_ranks": 1, "microbatch_rows": 2, "pad_id": prepared.pad_id}
    batch = Loader(prepared.table, make_order(run.run, prepared), **place).update(0)  # type: ignore[arg-type]
    shown = {sample["row"]: sample for sample in report["samples"]}
    for row, ids, labels in zip(batch.row_ids, batch.microbatches[0].input_ids, batch.microbatches[0].labels):
        if row < 0:
            continue
        pieces = [piece for document in shown[row]["documents"] for piece in document["pieces"]]
        tokens = [token for piece in pieces for token in piece["ids"]]
        weights = [piece["weight"] for piece in pieces for _ in piece["ids"]]
        assert ids.tolist() == tokens + [prepared.pad_id] * shown[row]["padding"]
        trained = [token for token, weight in zip(tokens, weights) if weight]
        assert [label for label in labels.tolist() if label != -100] == trained


@pytest.mark.parametrize(
    ("batching", "rows", "slots", "per_update"),
    [("pad", 4, 64, [2 + 15, 5 + 5]), ("bucket", 4, 44, [2 + 15, 5 + 5]), ("pack", 2, 32, [27])],
)
def test_slots_real_tokens_and_targets(
    batching: str, rows: int, slots: int, per_update: list[int], tmp_path: Path
) -> None:
    """A120: 3, 16, 6 and 6 tokens, two rows to a microbatch. bucket: 2 x 16 + 2 x 6; pack: rows of 16 and of 6 + 6 + 3."""
    run = loaded(tmp_path, [{"text": "x" * (size - 1)} for size in (3, 16, 6, 6)])
    prepared = prepare(run.run)
    assert prepared is not None
    found = measure(run.run, prepared, batching)
    assert (found.rows, found.slots, found.real, found.targets) == (rows, slots, 31, 27)
    assert found.padding == 1 - 31 / slots
    spread = found.targets_of_an_update
    assert (spread.least, spread.most, spread.mean) == (min(per_update), max(per_update), 27 / len(per_update))


def test_the_figures_of_bucket_are_those_of_the_loader(tmp_path: Path) -> None:
    """A120: 50 documents of 2 to 16 tokens, a part-filled last update, two data ranks: the slots that the loader counts."""
    lengths = np.random.default_rng(3).integers(2, 17, 50)
    changes = {"training__global_batch_size": 8, "data__shuffle": True, "data__batching": "bucket"}
    run = loaded(tmp_path, [{"text": "x" * (size - 1)} for size in lengths.tolist()], **changes)
    prepared = prepare(run.run)
    assert prepared is not None
    order = make_order(run.run, prepared)
    place = {"data_rank": 0, "data_ranks": 2, "microbatch_rows": 2, "pad_id": prepared.pad_id, "bucket_multiple": 1}
    batches = list(Loader(prepared.table, order, **place))  # type: ignore[arg-type]
    found = measure(run.run, prepared, "bucket")
    assert found.slots == sum(batch.slots for batch in batches)
    assert found.real == sum(batch.real_tokens for batch in batches) == int(lengths.sum())
    assert found.targets == sum(batch.target_tokens for batch in batches) == int(lengths.sum()) - 50
    assert found.targets_of_an_update.least == min(batch.target_tokens for batch in batches)


def test_lengths_fall_into_bins_that_end_at_max_length() -> None:
    lengths = np.array([3, 3, 4, 9, 10, 11, 40])
    assert bins(lengths, 10) == [(2, 3, 2), (4, 7, 1), (8, 10, 2), (11, 15, 1), (16, 31, 0), (32, 63, 1)]
    assert bins(np.array([5]), 1000) == [(4, 7, 1)]
    assert sum(count for _, _, count in bins(np.arange(1, 1025), 1024)) == 1024


def test_packed_attention_works_over_documents_weighted_by_tokens() -> None:
    """Documents of 2, 6 and 20 tokens in rows of 8: (2 x 2 + 6 x 6 + 20 x 8) / 28."""
    assert attended_length(np.array([2, 6, 20]), 8) == pytest.approx(200 / 28)


def test_a_row_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"There is no row 1. Rows are 0 to 0"):
        printed(loaded(tmp_path, [{"text": "abc"}]), row=1)


def test_the_verb_needs_no_torch_when_the_tokens_are_in_the_cache(tmp_path: Path) -> None:
    run = loaded(tmp_path, [talk("hi", "yes")])
    first = printed(run)
    assert "train: 1 documents of messages, 11 tokens -> 1 rows of 16" in first
    (tmp_path / "run.yaml").write_text(run.to_yaml())
    code = (
        "import sys, shardwright.cli as cli;"
        "sys.argv = ['shardwright', 'inspect', sys.argv[1], '--samples', '1'];"
        "exec('try:\\n cli.main()\\nexcept SystemExit as end:\\n assert not end.code, end.code');"
        "print([name for name in ('torch', 'transformers', 'datasets') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run.yaml")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT, check=True)
    assert done.stdout.splitlines()[-1] == "[]" and "u:hi<eos>a:[+yes<eos>+]" in done.stdout

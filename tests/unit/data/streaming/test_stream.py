"""Known faults A06 A22 A23 A24: rows of a stream are the same for all ranks, batch sizes and starts, each once a pass."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import IterableDataset
from tests.data_runs import EOS, run_over
from tests.places import EXAMPLES
from tests.started import LIMIT

from shardwright.config import RunFile, load_run_file
from shardwright.data import records
from shardwright.data.encode import Encoder
from shardwright.data.loader import Loader, UpdateBatch, prefetch
from shardwright.data.prepare import open_updates
from shardwright.data.streaming import record_stream
from shardwright.data.streaming.rows import StreamOrder
from shardwright.errors import CheckpointError, ConfigError, DataError
from shardwright.layout.legality import check_run
from shardwright.train.rows_done import SavedPosition, resume_rows

TEXTS = [f"{number:03d}" + "xyz"[: number % 4] for number in range(60)]


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of about six lines, four rows of a table and three records."""
    monkeypatch.setattr(records, "_SLICE_BYTES", 120)
    monkeypatch.setattr(records, "_SLICE_ROWS", 4)
    monkeypatch.setattr(record_stream, "_SLICE_RECORDS", 3)


def lines(texts: list[str]) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def numbers() -> IterableDataset:
    """The documents as a user's stream."""

    def examples() -> Iterator[dict[str, str]]:
        yield from ({"text": text} for text in TEXTS)

    return IterableDataset.from_generator(examples)


def write(directory: Path, kind: str) -> list[str]:
    """The documents in two files of a kind, or as a function; entries of data.train."""
    if kind == "function":
        return [f"{__name__}:numbers"]
    for name, part in (("a", TEXTS[:23]), ("b", TEXTS[23:])):
        if kind == "jsonl":
            (directory / f"{name}.jsonl").write_text(lines(part))
        elif kind == "jsonl.gz":
            (directory / f"{name}.jsonl.gz").write_bytes(gzip.compress(lines(part).encode()))
        elif kind == "json":
            (directory / f"{name}.json").write_text(json.dumps([{"text": text} for text in part]))
        else:
            pq.write_table(pa.table({"text": part}), directory / f"{name}.parquet", row_group_size=7)
    return [str(directory / f"*.{kind}")]


def run_file(directory: Path, entries: list[str], *, batch: int = 4, steps: int = 30, **data: Any) -> RunFile:
    settings = {"train": entries, "max_length": 8, "num_proc": None, "streaming": True, "stream_window": 10}
    return run_over(directory, training={"max_steps": steps, "global_batch_size": batch}, **settings | data)


def loader(run: RunFile, rank: int = 0, ranks: int = 1, rows: int = 1, **widths: Any) -> Loader:
    train = open_updates(run)
    place: dict[str, Any] = {"data_rank": rank, "data_ranks": ranks, "microbatch_rows": rows, **widths}
    return Loader(train.rows, train.order, pad_id=train.pad_id, **place)


def seek(found: Loader, update: int, cursor: Any, trusted: bool = False) -> None:
    assert isinstance(found.order, StreamOrder)
    found.order.seek(update, cursor, trusted)


def documents(batches: list[UpdateBatch]) -> list[str]:
    """The documents of one update in the order of rows, put together from the parts of all data ranks."""
    found = []
    for part in sorted((part for batch in batches for part in batch.microbatches), key=lambda part: part.index):
        trained = part.labels[:, :-1] >= 0
        assert (part.labels[:, :-1] == part.input_ids[:, 1:])[trained].all() and trained.any(1).all()
        for row, ids in enumerate(part.input_ids.tolist()):
            numbers = [-1] * len(ids) if part.documents is None else part.documents[row].tolist()
            text: list[int] = []
            for token, number in zip(ids, numbers):
                if token == EOS and number >= (-1 if part.documents is None else 0):
                    found.append(bytes(text).decode())
                    text = []
                    if part.documents is None:
                        break
                else:
                    text.append(token)
    return found


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "function"])
def test_without_shuffling_the_rows_are_the_documents_pass_after_pass(tmp_path: Path, kind: str) -> None:
    """A06 A22: nothing left out or repeated at the ends of slices, windows, files and passes."""
    found = loader(run_file(tmp_path, write(tmp_path, kind), shuffle=False))
    seen = [text for number in range(30) for text in documents([found.update(number)])]
    assert seen == TEXTS + TEXTS
    batch = found.update(0)
    assert batch.target_tokens == sum(len(text) for text in TEXTS[:4]) and batch.target_weight is None


@pytest.mark.parametrize("batching", ["pad", "bucket", pytest.param("pack", marks=pytest.mark.slow)])
def test_the_order_depends_on_the_seed_and_the_stream_only(tmp_path: Path, batching: str) -> None:
    """A22 A23 A24: any number of ranks, rows of a microbatch and updates give the same rows one after the other."""
    entries = write(tmp_path, "jsonl")
    multiple = {"bucket_multiple": 1} if batching == "bucket" else {}

    def seen(batch: int, ranks: int, rows: int) -> list[list[str]]:
        run = run_file(tmp_path, entries, batch=batch, batching=batching, max_length=16)
        parts = [loader(run, rank, ranks, rows, **multiple) for rank in range(ranks)]
        return [documents([part.update(number) for part in parts]) for number in range(48 // batch)]

    once = seen(2, 1, 1)
    flat = [sorted(text for update in once[2 * k : 2 * k + 2] for text in update) for k in range(12)]
    assert [sorted(update) for update in seen(4, 1, 4)] == flat
    assert [sorted(update) for update in seen(4, 2, 1)] == flat
    assert [sorted(update) for update in seen(4, 4, 1)] == flat
    if batching != "pack":
        whole = [text for update in once for text in update]
        assert sorted(whole) == sorted(set(whole)) and whole != TEXTS[:48]  # each once, and shuffled
    other = run_file(tmp_path, entries, batch=2, batching=batching, max_length=16)
    training = other.training.model_copy(update={"seed": 43})
    part = loader(other.model_copy(update={"training": training}), **multiple)
    assert [documents([part.update(number)]) for number in range(24)] != once


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "batching"),
    [(kind, batching) for kind in ("jsonl", "parquet", "function") for batching in ("pad", "pack")]
    + [("jsonl.gz", "pad"), ("json", "pad")],
)
def test_any_update_is_a_place_to_go_on_from(tmp_path: Path, kind: str, batching: str) -> None:
    """Cursors are plain values; the rows after them do not depend on where the run was taken up."""
    run = run_file(tmp_path, write(tmp_path, kind), batching=batching, max_length=16, steps=20)
    batches = list(prefetch(loader(run)))
    expected = [documents([batch]) for batch in batches]
    for update in (1, 5, 6, 13, 19):
        again = loader(run)
        seek(again, update, json.loads(json.dumps(batches[update - 1].cursor)))
        assert [documents([batch]) for batch in prefetch(again, update)] == expected[update:]


def _former(update: int, cursor: Any, **settings: Any) -> SavedPosition:
    values = {"training.max_steps": 30, "training.global_batch_size": 4, "training.seed": 42, "data.shuffle": True}
    return SavedPosition(update, cursor, "stream", values | settings)


def test_a_stream_goes_on_with_another_batch_size(tmp_path: Path) -> None:
    """A50: 5 updates of 4 rows, then updates of 3: the rows one after the other, and the line says so."""
    entries = write(tmp_path, "jsonl")
    whole = loader(run_file(tmp_path, entries, batch=1, steps=60))
    one_by_one = [text for number in range(38) for text in documents([whole.update(number)])]
    first = loader(run_file(tmp_path, entries))
    cursor = [first.update(number) for number in range(5)][-1].cursor
    run = run_file(tmp_path, entries, batch=3, steps=11)
    again = loader(run)
    said = resume_rows(again.order, _former(5, json.loads(json.dumps(cursor))), run, "stream")
    assert [text for number in range(5, 11) for text in documents([again.update(number)])] == one_by_one[20:38]
    assert "20 rows are done, and update 5 begins in window 1 of the stream; no row is repeated or skipped" in said[0]
    assert said[1].startswith("The run now has 11 updates instead of 30, and lr_scheduler_type linear follows")


def test_what_another_seed_repeats_of_a_window_is_counted(tmp_path: Path) -> None:
    """The window under way is read in another order: as many of its rows come twice as do not come."""
    entries = write(tmp_path, "jsonl")
    first = loader(run_file(tmp_path, entries))
    batches = [first.update(number) for number in range(6)]
    run = run_file(tmp_path, entries, shuffle=False)
    again = loader(run)
    (line,) = resume_rows(again.order, _former(6, batches[-1].cursor), run, "stream")
    done = [text for batch in batches for text in documents([batch])]
    rest = [text for number in range(6, 15) for text in documents([again.update(number)])]
    twice = len(set(done) & set(rest))
    assert 0 < twice == 60 - len({*done, *rest})
    assert f"The order of its rows has changed: {twice} rows are repeated, and {twice} are skipped" in line


def test_a_checkpoint_of_rows_on_disk_does_not_stand_in_a_stream(tmp_path: Path) -> None:
    run = run_file(tmp_path, write(tmp_path, "jsonl"), shuffle=False)
    again = loader(run)
    (line,) = resume_rows(again.order, _former(3, {"rows": 12, "segments": []}), run, "stream")
    assert line == "The stream is read from its beginning: the checkpoint was trained on other data."
    assert documents([again.update(3)]) == TEXTS[:4]


def test_a_resumed_stream_reads_nothing_before_its_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read is overwritten with as many bytes that are no JSON: neither read nor tokenised again."""
    run = run_file(tmp_path, write(tmp_path, "jsonl"), steps=14)
    batches = list(prefetch(loader(run)))
    cursor = batches[10].cursor
    assert cursor is not None and cursor["place"]["source"] == 1
    (tmp_path / "a.jsonl").write_bytes(b"!" * (tmp_path / "a.jsonl").stat().st_size)
    path, begin = tmp_path / "b.jsonl", cursor["place"]["byte"]
    assert begin > 0
    path.write_bytes(b"!" * begin + path.read_bytes()[begin:])
    monkeypatch.setattr(record_stream.FileSource, "format", lambda self, data: "text")  # of the first record
    sliced: list[int] = []
    plain = Encoder.slice
    monkeypatch.setattr(Encoder, "slice", lambda self, part, form: sliced.append(part.start) or plain(self, part, form))
    again = loader(run)
    seek(again, 11, cursor)
    assert documents([again.update(11)]) == documents([batches[11]])
    assert min(sliced) == begin


def test_another_stream_is_refused(tmp_path: Path) -> None:
    """Of files that were read the sizes are compared, of the window that is read on the contents."""
    run = run_file(tmp_path, write(tmp_path, "jsonl"), steps=14)
    cursor = list(prefetch(loader(run)))[10].cursor
    assert cursor is not None
    whole = (tmp_path / "b.jsonl").read_text()
    first = whole.splitlines()[cursor["place"]["line"] - 1]
    (tmp_path / "b.jsonl").write_text(whole.replace(first, first.replace('"0', '"9')))
    with pytest.raises(CheckpointError, match=r"b\.jsonl:\d+ on, the documents have changed"):
        seek(loader(run), 11, cursor)
    seek(loader(run), 11, cursor, trusted=True)
    (tmp_path / "b.jsonl").write_text(whole + lines(["more at the end, read later"]))
    seek(loader(run), 11, cursor)
    (tmp_path / "a.jsonl").write_text(lines(TEXTS[:22]))
    with pytest.raises(CheckpointError, match="or their sizes have"):
        seek(loader(run), 11, cursor)


def test_windows_are_made_once_for_ranks_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks in step: each slice is tokenised once a pass, and few windows stay."""
    run = run_file(tmp_path, write(tmp_path, "jsonl"), batching="pack", max_length=16, steps=24)
    sliced: list[tuple[int, int]] = []
    plain, lock = Encoder.slice, threading.Lock()

    def counted(self: Encoder, part: Any, form: str) -> Any:
        with lock:
            sliced.append((part.file, part.start))
        return plain(self, part, form)

    monkeypatch.setattr(Encoder, "slice", counted)
    parts = [loader(run, rank, 4) for rank in range(4)]
    results: list[list[UpdateBatch]] = [[] for _ in parts]
    together = threading.Barrier(4, timeout=LIMIT)

    def train(number: int) -> None:
        for update in range(24):
            results[number].append(parts[number].update(update))
            together.wait()

    threads = [threading.Thread(target=train, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [len(result) for result in results] == [24] * 4
    targets = [[batch.target_tokens for batch in result] for result in results]
    own = [sum(int((part.labels >= 0).sum()) for part in r.microbatches) for result in results for r in result]
    assert targets[1:] == targets[:-1] and sum(own) == sum(targets[0])
    cursor = results[0][-1].cursor
    assert cursor is not None
    passes = 2 + cursor["place"]["turn"]  # the one that is begun ahead, too
    assert all(sliced.count(found) <= passes for found in sliced)
    kept = list((tmp_path / "runs" / ".cache").glob("stream-*/window-*"))
    assert 1 <= len(kept) <= 6


@pytest.mark.parametrize("bad", [13, 20, 27, 34, 41, 48])
def test_a_bad_line_is_named_when_the_stream_comes_to_it(tmp_path: Path, bad: int) -> None:
    """With file and line, in whatever slice of a window; an empty stream is no endless loop."""
    (tmp_path / "a.jsonl").write_text(lines(TEXTS[: bad - 1]) + "no\n" + lines(TEXTS[bad - 1 :]))
    found, seen = loader(run_file(tmp_path, [str(tmp_path / "a.jsonl")], shuffle=False)), []
    with pytest.raises(DataError, match=rf"a\.jsonl:{bad}: the line is not JSON"):
        for number in range(15):
            seen += documents([found.update(number)])
    assert seen == TEXTS[: len(seen)] and len(seen) < bad
    (tmp_path / "b.jsonl").write_text(lines(["", " "]))
    with pytest.raises(DataError, match="None of the 2 documents of the stream can be trained"):
        loader(run_file(tmp_path, [str(tmp_path / "b.jsonl")])).update(0)


def test_weights_of_one_window_reach_updates_across_windows(tmp_path: Path) -> None:
    """A row of a window without weights beside one with weights has weights of one."""
    records = [{"input_ids": [5, 6, 7]} for _ in range(12)] + [
        {"input_ids": [5, 6, 7], "loss_weights": [1.0, 0.5, 2.0]} for _ in range(12)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    run = run_file(tmp_path, [str(tmp_path / "a.jsonl")], batch=4, steps=6, shuffle=False, stream_window=5)
    found = loader(run, rows=4)
    batches = [found.update(number) for number in range(6)]
    assert [batch.target_weight for batch in batches] == [None, None, 8.0, 10.0, 10.0, 10.0]
    sums = [b.divisor for b in batches]
    assert sum(sums) == pytest.approx(12 * 2 + 12 * 2.5)
    for batch in batches:
        (part,) = batch.microbatches
        weights = np.ones(part.labels.shape) if part.weights is None else part.weights.numpy()
        assert weights[part.labels.numpy() >= 0].sum() == pytest.approx(batch.divisor)


def test_what_a_stream_cannot_do_is_refused(tmp_path: Path) -> None:
    """Before ranks start, with the reason."""
    entries = write(tmp_path, "jsonl")

    def checked(**keys: Any) -> None:
        values = {
            "model.model_name_or_path": str(EXAMPLES / "tiny"), "model.init": "random", "data.train": entries,
            "data.streaming": True, "training.max_steps": 2, "training.global_batch_size": 2,
            **{key.replace("__", "."): value for key, value in keys.items()},
        }  # fmt: skip
        check_run(load_run_file(None, {key: value for key, value in values.items() if value is not None}), 1)

    checked()
    with pytest.raises(ConfigError, match="num_train_epochs with"):
        checked(training__max_steps=None, training__num_train_epochs=1)
    with pytest.raises(ConfigError, match="bucket_updates with"):
        checked(data__batching="bucket", data__bucket_updates=2)
    with pytest.raises(ConfigError, match=r"data\.stream_window.*no effect"):
        checked(data__streaming=False, data__stream_window=5)
    with pytest.raises(ConfigError, match=r"data\.num_proc.*no effect"):
        checked(data__num_proc=2)
    weighted = run_file(tmp_path, [{"path": entries[0], "weight": 2.0}])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="needs the number of rows"):
        open_updates(weighted)
    with pytest.raises(ConfigError, match="no `number`"):
        open_updates(run_file(tmp_path, [f"{__name__}:number"]))
    with pytest.raises(ConfigError, match="no state_dict and no load_state_dict"):
        open_updates(run_file(tmp_path, [f"{__name__}:plain_list"]))


def plain_list() -> list[dict[str, str]]:
    """Records without a place to go on from."""
    return [{"text": "a"}]

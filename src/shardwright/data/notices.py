"""What a person should know of a split before training: what was left out, changed, or has no effect, one line each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.config.schema import RunFile
from shardwright.data.files import file_notices, is_compressed, sources_of
from shardwright.data.notes import Note
from shardwright.data.special import UNENDED, trained_ends
from shardwright.layout.import_path import is_import_path

_LINES = {
    "begin twice": "{count} of {of} records begin with {subject} twice, in the text and before the text: one is kept",
    "end twice": "{count} of {of} records end in {subject} twice, from the text and from the tokenizer: one is kept",
    "begin missing": "{count} of {of} records begin without {subject}, which the tokenizer puts before a text and the chat "
    "template does not write",
    "begins again": "{count} of {of} records hold {subject}, which begins a text, more than once, and are trained as one text",
    "ends before": "{count} of {of} records hold the end token {subject} before their end, and are trained as one text",
    "stops twice": "{count} trained turns end in {subject} twice: the content holds one, the chat template writes one",
    "empty turn": "{count} of {of} records have an empty assistant message: only the end of the turn is trained",
    "divided": "{subject} divides {count} of {of} records into documents that do not see each other",
    "dated": "{count} of {of} records are rendered with today's date, which the chat template writes",
    "idle": "{subject} has no effect in {count} of {of} records: the chat template leaves it out",
    "changed": "{subject} in {count} of {of} records, as the chat template expects",
}
"""Kinds of notes -> what is said of them; the place of the first follows."""


@dataclass(frozen=True)
class _Total:
    """A note over all files. place: `file:line` of the first."""

    count: int
    place: str


def notices(
    run: RunFile, split: str, tokenizer_path: Path | None, meta: dict[str, Any], counts: dict[str, int]
) -> list[str]:
    """The lines of a split. meta: of its documents. counts: of its rows."""
    entries = run.data.train if split == "train" else run.data.validation
    files = [source for source in sources_of(entries) if not is_import_path(source.path)]
    notes = [Note(*values) for values in meta["notes"]]
    lines = [
        *file_notices(files),
        *_of_files(meta, notes),
        *_of_records(meta, notes),
        *_of_ends(run, meta, notes),
        *(_of_settings(run, tokenizer_path, meta, notes) if split == "train" else ()),
        *_of_counts(run, meta, counts),
    ]
    return [f"{split}: {line}" for line in lines]


def _of_files(meta: dict[str, Any], notes: list[Note]) -> Iterator[str]:
    """Files without records, and columns that nothing reads; files with the same columns share a line."""
    sizes = {note.file: note.count for note in notes if note.kind == "record"}
    for number, path in enumerate(meta["files"]):
        if number not in sizes and not meta.get("next"):  # a window of a stream need not reach every file
            yield f"{path} holds no record"
    unpacked = [
        path for path in meta["files"] if is_compressed(path) and str(Path(path).with_suffix("")) in meta["files"]
    ]
    if unpacked:
        yield (
            f"{unpacked[0]} and {Path(unpacked[0]).with_suffix('').name} are both read: where one was unpacked from the other, "
            f"their documents count twice (such pairs: {len(unpacked)})"
        )
    columns: dict[int, dict[str, int]] = {}
    for note in notes:
        if note.kind == "column":
            columns.setdefault(note.file, {})[note.subject] = note.count
    alike: dict[tuple[str, ...], list[int]] = {}
    for file, found in sorted(columns.items()):
        alike.setdefault(tuple(sorted(found)), []).append(file)
    for names, files in alike.items():
        size = sum(sizes[file] for file in files)
        parts = [f"`{name}` (in {sum(columns[file][name] for file in files):,} of {size:,} records)" for name in names]
        more = f" and {len(files) - 1} other files" if len(files) > 1 else ""
        yield f"{meta['files'][files[0]]}{more}: nothing reads the columns {', '.join(parts)}"


def _of_records(meta: dict[str, Any], notes: list[Note]) -> Iterator[str]:
    of = sum(note.count for note in notes if note.kind == "record")
    for (kind, subject), total in _totals(meta, notes).items():
        if kind in _LINES:
            shown = subject if kind in ("idle", "changed") else f"`{subject}`"
            yield f"{_LINES[kind].format(count=total.count, of=of, subject=shown)}; the first is {total.place}"


def _of_ends(run: RunFile, meta: dict[str, Any], notes: list[Note]) -> Iterator[str]:
    """Lines where the trained text does not teach the model to stop, or with a token that does not stop generation."""
    totals = _totals(meta, notes)
    turns = sum(total.count for (kind, _), total in totals.items() if kind == "end")
    if (unended := totals.get(("end", UNENDED))) is not None:
        yield (
            f"{unended.count} of {turns} trained turns end in no special token, so the model does not learn to end them; the "
            f"first is {unended.place}. The token that ends a turn must be trained: put the token inside the "
            "{% generation %} marks of a chat template, or set data.append_eos for a completion"
        )
    stops = {"the tokenizer": [meta["eos_id"]] if meta["eos_id"] is not None else [], **_stops(run)}
    for token, text in trained_ends(meta).items():
        without = [f"{name} ({', '.join(map(str, ids))})" for name, ids in stops.items() if ids and token not in ids]
        if without:
            yield (
                f"trained turns end in `{text}` ({token}), which is not an end token of {' nor of '.join(without)}: generation "
                "that follows these settings does not stop there"
            )


def _stops(run: RunFile) -> dict[str, list[int]]:
    """The end tokens by which the model, as its directory is now, generates: of the file that decides."""
    for name in ("generation_config.json", "config.json"):
        path = Path(run.model.model_name_or_path) / name
        if not path.is_file():
            continue
        values = json.loads(path.read_text(encoding="utf-8"))
        if name == "config.json":
            values |= run.model.config_overrides
        ids = values.get("eos_token_id", values.get("text_config", {}).get("eos_token_id"))
        if ids is not None:
            return {name: ids if isinstance(ids, list) else [ids]}
    return {}


def _of_settings(run: RunFile, tokenizer_path: Path | None, meta: dict[str, Any], notes: list[Note]) -> Iterator[str]:
    """Keys of section data without effect, which only the records show."""
    formats = {form for form in meta["formats"] if form is not None}
    chats = sum(note.count for note in notes if note.kind == "chat")
    if run.data.append_eos and meta["eos_id"] is None and {"text", "prompt_completion"} & formats:
        yield f"the tokenizer in {tokenizer_path} has no eos token: data.append_eos has no effect"
    if not chats and "prompt_completion" in formats:
        for key in ("chat_template", "assistant_only_loss"):
            if getattr(run.data, key) is not None:
                yield f"data.{key} has no effect: no record holds messages"


def _of_counts(run: RunFile, meta: dict[str, Any], counts: dict[str, int]) -> Iterator[str]:
    """What was left out or cut."""
    length, read, documents = run.data.max_length, counts["documents_read"], counts["documents"]
    if counts["empty_documents"]:
        yield f"{counts['empty_documents']} of {read} documents are empty and left out"
    if counts["masked_documents"]:
        yield (
            f"{counts['masked_documents']} of {read} documents have no token that is trained and are left out; "
            f"the first is {meta['first']['masked']}"
        )
    if counts["crossing_tokens"]:
        yield (
            f"in {counts['crossing_tokens']} of {read} documents a token holds characters of the given text and of "
            f"the trained text, and is trained; the first is {meta['first']['crossing']}"
        )
    if counts["split_documents"]:
        yield f"{counts['split_documents']} of {documents} documents are longer than {length} tokens and split"
    if counts["truncated_documents"]:
        yield (
            f"{counts['truncated_documents']} of {documents} documents are longer than {length} tokens and "
            f"cut off; {counts['truncated_tokens']} of {counts['tokens']} tokens are lost"
        )
    if counts["targetless_rows"]:
        yield f"{counts['targetless_rows']} pieces of documents hold no target and are left out"
    full = -(-counts["row_tokens"] // length)
    if run.data.batching == "pad" and counts["rows"] > 2 * full:
        yield (
            f"more than half of the slots are padding; data.batching pack would put the tokens of these "
            f"{counts['rows']:,} rows into about {full:,}, and bucket pads rows only to the longest of their microbatch"
        )


def _totals(meta: dict[str, Any], notes: list[Note]) -> dict[tuple[str, str], _Total]:
    """The notes over all files, by kind and subject."""
    found: dict[tuple[str, str], _Total] = {}
    for note in notes:
        key, place = (note.kind, note.subject), f"{meta['files'][note.file]}:{note.line}"
        before = found.get(key, _Total(0, place))
        found[key] = _Total(before.count + note.count, before.place)
    return found

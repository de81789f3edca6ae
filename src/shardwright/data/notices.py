"""Notices: printed lines about a split, before training. Each names data or settings left out, changed or without effect.

Notices are made from notes: facts about records that are counted while the records are tokenised, and kept with the tokens.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwright.config.schema import RunFile
from shardwright.data.files import file_notices, is_compressed, sources_of
from shardwright.data.formats import FORMATS
from shardwright.layout.import_path import is_import_path
from shardwright.units import counted

NoteKey = tuple[str, str]
"""Kind and subject of a note."""
NO_END = ""
"""The subject of a note `end` about a turn that ends in no special token."""

_LINES = {
    "begin twice": "{count} of {of} records begin with {subject} twice: the text holds this token, and the tokenizer adds it. "
    "One of the two is kept",
    "end twice": "{count} of {of} records end with {subject} twice: the text holds this token, and the tokenizer adds it. "
    "One of the two is kept",
    "begin missing": "{count} of {of} records begin without {subject}: the tokenizer adds this token to a text, and the chat "
    "template does not write it",
    "begins again": "{count} of {of} records hold {subject}, the token that begins a text, more than once. Each of these "
    "records is trained as one text",
    "ends before": "{count} of {of} records hold the end token {subject} before their end. Each of these records is trained "
    "as one text",
    "stops twice": "{count} trained turns end in {subject} twice: the content holds this token, and the template writes it",
    "empty turn": "{count} of {of} records have an empty assistant message. Only the end of this turn is trained",
    "divided": "{subject} divides {count} of {of} records into documents that do not attend to each other",
    "dated": "{count} of {of} records hold today's date, which the chat template writes",
    "idle": "{subject} has no effect in {count} of {of} records: the chat template leaves it out",
    "changed": "{subject} in {count} of {of} records, as the chat template expects",
}
"""Kinds of notes about records -> their notice. The file and line of the first record follow."""


@dataclass(frozen=True)
class Note:
    """A fact about records (or turns) of one file."""

    kind: str
    subject: str  # of the kind, as text
    file: int  # number of the file
    count: int  # how many records
    line: int  # of the first record


@dataclass(frozen=True)
class Total:
    """A note over all files."""

    count: int
    first: str  # `file:line` of the first record


class Notes:
    """Counts by kind, subject and file."""

    def __init__(self, notes: Iterable[Note] = ()) -> None:
        self._found: dict[tuple[str, str, int], tuple[int, int]] = {}
        for note in notes:
            self.add(note.kind, note.subject, note.file, note.line, note.count)

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> Notes:
        """The notes in the meta.json of documents."""
        return cls(Note(*values) for values in meta["notes"])

    def add(self, kind: str, subject: str, file: int, line: int, count: int = 1) -> None:
        """Counts `count` more; the line that was given first stays."""
        before, first = self._found.get((kind, subject, file), (0, line))
        self._found[kind, subject, file] = (before + count, first)

    def update(self, other: Notes) -> None:
        """Adds the notes of later records."""
        for note in other:
            self.add(note.kind, note.subject, note.file, note.line, note.count)

    def __iter__(self) -> Iterator[Note]:
        return (Note(*key, *value) for key, value in self._found.items())

    def count(self, kind: str) -> int:
        """How often a kind was noted."""
        return sum(note.count for note in self if note.kind == kind)

    def totals(self, files: list[str]) -> dict[NoteKey, Total]:
        """The notes over all files, by kind and subject."""
        found: dict[NoteKey, Total] = {}
        for note in self:
            before = found.get((note.kind, note.subject), Total(0, f"{files[note.file]}:{note.line}"))
            found[note.kind, note.subject] = replace(before, count=before.count + note.count)
        return found


def trained_ends(meta: Mapping[str, Any]) -> dict[int, str]:
    """The special tokens (id -> text) at the ends of trained parts, the most frequent first.

    A program that generates text must stop at these tokens: they are the end tokens of the trained model.
    """
    counts: Counter[str] = Counter()
    for note in Notes.of(meta):
        if note.kind == "end" and note.subject != NO_END:
            counts[note.subject] += note.count
    found = (subject.partition(" ") for subject, _ in counts.most_common())
    return {int(token): text for token, _, text in found}


def notices(
    run: RunFile, split: str, tokenizer_path: Path | None, meta: dict[str, Any], counts: dict[str, int]
) -> list[str]:
    """The notices of a split. meta: meta.json of its documents. counts: of its documents and rows."""
    entries = run.data.train if split == "train" else run.data.validation
    notes = Notes.of(meta)
    totals = notes.totals(meta["files"])
    lines = [
        *file_notices([source for source in sources_of(entries) if not is_import_path(source.path)]),
        *_of_files(meta, notes),
        *_of_records(totals),
        *_of_ends(run, meta, totals),
        *(_of_settings(run, tokenizer_path, meta, totals) if split == "train" else ()),
        *_of_counts(run, totals, counts),
    ]
    return [f"{split}: {line}" for line in lines]


def _of_files(meta: dict[str, Any], notes: Notes) -> Iterator[str]:
    """Files without records, and columns that nothing reads; files with the same columns share a line."""
    files = meta["files"]
    sizes = {note.file: note.count for note in notes if note.kind == "record"}
    for number, path in enumerate(files):
        if number not in sizes and not meta.get("next"):  # a window of a stream need not reach every file
            yield f"{path} holds no record"
    unpacked = [path for path in files if is_compressed(path) and str(Path(path).with_suffix("")) in files]
    if unpacked:
        yield (
            f"{unpacked[0]} and {Path(unpacked[0]).with_suffix('').name} are both read: if one file is the decompressed "
            f"other, their documents count twice (such pairs: {len(unpacked)})"
        )
    columns: dict[int, dict[str, int]] = {}
    for note in notes:
        if note.kind == "column":
            columns.setdefault(note.file, {})[note.subject] = note.count
    alike: dict[tuple[str, ...], list[int]] = {}
    for file, found in sorted(columns.items()):
        alike.setdefault(tuple(sorted(found)), []).append(file)
    for names, same in alike.items():
        size = sum(sizes[file] for file in same)
        parts = [f"`{name}` (in {sum(columns[file][name] for file in same):,} of {size:,} records)" for name in names]
        more = f" and {len(same) - 1} other files" if len(same) > 1 else ""
        yield f"{files[same[0]]}{more}: nothing reads the columns {', '.join(parts)}"


def _of_records(totals: dict[NoteKey, Total]) -> Iterator[str]:
    of = totals["record", ""].count if ("record", "") in totals else 0
    for (kind, subject), total in totals.items():
        if kind in _LINES:
            shown = subject if kind in ("idle", "changed") else f"`{subject}`"
            yield f"{_LINES[kind].format(count=total.count, of=of, subject=shown)}. First: {total.first}"


def _of_ends(run: RunFile, meta: dict[str, Any], totals: dict[NoteKey, Total]) -> Iterator[str]:
    """Lines where the trained text does not teach the model to stop, or with a token that does not stop generation."""
    turns = sum(total.count for (kind, _), total in totals.items() if kind == "end")
    if (unended := totals.get(("end", NO_END))) is not None:
        yield (
            f"{unended.count} of {turns} trained turns end in no special token, so the model does not learn to end them. "
            "The token that ends a turn must be trained: put the token inside the {% generation %} marks of the chat "
            f"template, or set data.append_eos for a completion. First: {unended.first}"
        )
    stops = {"the tokenizer": [meta["eos_id"]] if meta["eos_id"] is not None else [], **_stops(run)}
    for token, text in trained_ends(meta).items():
        without = [f"{name} ({', '.join(map(str, ids))})" for name, ids in stops.items() if ids and token not in ids]
        if without:
            yield (
                f"trained turns end in `{text}` ({token}), which is not an end token of {' nor of '.join(without)}: "
                "generation with these settings does not stop at this token"
            )


def _stops(run: RunFile) -> dict[str, list[int]]:
    """The end tokens at which the model, as its directory is now, stops generation, and the file that names them."""
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


def _of_settings(
    run: RunFile, tokenizer_path: Path | None, meta: dict[str, Any], totals: dict[NoteKey, Total]
) -> Iterator[str]:
    """Keys of section data without effect, which only the records show."""
    settings = {key for form in meta["formats"] for key in FORMATS[form].settings}
    if run.data.append_eos and meta["eos_id"] is None and "append_eos" in settings:
        yield f"data.append_eos has no effect: the tokenizer in {tokenizer_path} has no end token (eos_token)"
    if ("chat", "") not in totals:  # prompts and completions that are strings
        for key in ("chat_template", "assistant_only_loss"):
            if key in settings and getattr(run.data, key) is not None:
                yield f"data.{key} has no effect: no record holds messages"


def _of_counts(run: RunFile, totals: dict[NoteKey, Total], counts: dict[str, int]) -> Iterator[str]:
    """Lines about documents that were left out or cut."""
    length, read, documents = run.data.max_length, counts["documents_read"], counts["documents"]
    if counts["empty_documents"]:
        yield f"{counts['empty_documents']} of {read} documents are empty and left out"
    if counts["masked_documents"]:
        yield (
            f"{counts['masked_documents']} of {read} documents have no trained token and are left out. "
            f"First: {totals['masked', ''].first}"
        )
    if counts["crossing_tokens"]:
        yield (
            f"in {counts['crossing_tokens']} of {read} documents a token holds characters of the prompt and of the trained "
            f"text. This token is trained. First: {totals['crossing', ''].first}"
        )
    if counts["split_documents"]:
        yield f"{counts['split_documents']} of {documents} documents are longer than {length} tokens and are split"
    if counts["truncated_documents"]:
        yield (
            f"{counts['truncated_documents']} of {documents} documents are longer than {length} tokens and are cut off: "
            f"{counts['truncated_tokens']} of {counts['tokens']} tokens are lost"
        )
    if counts["targetless_rows"]:
        left_out = counts["targetless_rows"]
        hold = "holds no target and is" if left_out == 1 else "hold no target and are"
        yield f"{counted(left_out, 'piece')} of documents {hold} left out"
    full = -(-counts["row_tokens"] // length)
    if run.data.batching == "pad" and counts["rows"] > 2 * full:
        yield (
            f"more than half of the slots are padding. data.batching pack would put the tokens of these {counts['rows']:,} "
            f"rows into about {full:,} rows; bucket pads rows only to the longest row of their microbatch"
        )

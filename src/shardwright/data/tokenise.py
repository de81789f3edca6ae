"""Tokenises documents in parallel through `datasets` and writes them as one memory-mappable directory."""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.data import sources
from shardwright.data.table import FORMAT, Documents, new_directory, token_dtype
from shardwright.errors import ConfigError, DataError

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.tiktoken",
)
_DOCUMENTS_PER_PROCESS = 500  # below that, starting a process takes longer than the tokenising
_BATCH = 1000


def tokenizer_directory(name: str, key: str) -> Path:
    """The directory of the tokenizer `name`: a directory, or a name that Hugging Face's local cache holds.

    Raises `ConfigError` when it has no tokenizer. Nothing is fetched.
    """
    path = Path(name)
    if not path.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            path = Path(snapshot_download(name, local_files_only=True))
        except (HFValidationError, LocalEntryNotFoundError):
            raise ConfigError(
                f"{key}: `{name}` is no directory, and Hugging Face's local cache does not hold it.",
                "Nothing is fetched over the network.",
                "Name a directory with a tokenizer.json.",
            ) from None
    if not tokenizer_files(path):
        raise ConfigError(
            f"{key}: {path} has no tokenizer.",
            "Text cannot be tokenised without one.",
            "Set model.tokenizer_name_or_path to a directory with a tokenizer.json.",
        )
    return path


def tokenizer_files(path: Path) -> list[Path]:
    """The files of the directory that decide how text is tokenised."""
    return sorted({file for pattern in _TOKENIZER_FILES for file in path.glob(pattern)})


def load_tokenizer(path: Path) -> Any:
    """The Hugging Face tokenizer in the directory `path`."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(
            f"The tokenizer in {path} cannot be loaded.", str(error).strip().splitlines()[0]
        ) from error


def _tokenise(table: Any, *, tokenizer: Any, eos: int | None) -> Any:
    """An arrow table {text, file, line} -> {ids, file, line}; blank texts become empty lists."""
    import pyarrow as pa

    rows = []
    for text in table["text"].to_pylist():
        ids = tokenizer(text, return_attention_mask=False, verbose=False)["input_ids"] if text.strip() else []
        if ids and eos is not None and ids[-1] != eos:
            ids.append(eos)
        rows.append(np.asarray(ids, np.int32))
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    ids = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(rows)))
    return pa.table({"ids": ids, "file": table["file"], "line": table["line"]})


def _read(
    datasets: Any, files: Sequence[Path], text_column: str, num_proc: int, cache: Path, split: str
) -> Any:
    """A `datasets.Dataset` {text, file, line} of the documents; several files are read side by side."""
    numbered = [(number, str(file)) for number, file in enumerate(files)]
    if next(sources.documents(numbered, text_column), None) is None:
        raise DataError(f"There is no document in {', '.join(map(str, files))}.", "The files are empty.")
    features = {
        "text": datasets.Value("large_string"),
        "file": datasets.Value("int32"),
        "line": datasets.Value("int64"),
    }
    try:
        return datasets.Dataset.from_generator(
            sources.documents,
            features=datasets.Features(features),
            cache_dir=str(cache),
            gen_kwargs={"files": numbered, "text_column": text_column},
            num_proc=min(num_proc, len(files)) if min(num_proc, len(files)) > 1 else None,
            split=datasets.NamedSplit(split),
            fingerprint="documents",
        )
    except datasets.exceptions.DatasetGenerationError:
        for _ in sources.documents(
            numbered, text_column
        ):  # raises again, here and at the first bad line of all
            pass
        raise


def write_documents(
    path: Path,
    files: Sequence[Path],
    tokenizer_path: Path,
    *,
    text_column: str,
    append_eos: bool,
    num_proc: int,
    split: str,
) -> Documents:
    """Reads and tokenises `files` into the new directory `path` and opens it.

    Shows progress bars on a terminal. Raises `DataError` with file and line for what cannot be read.
    """
    import datasets

    datasets.config.HF_HUB_OFFLINE = True
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    tokenizer = load_tokenizer(tokenizer_path)
    with new_directory(path) as work, tempfile.TemporaryDirectory(dir=work) as cache:
        texts = _read(datasets, files, text_column, num_proc, Path(cache), split)
        processes = min(num_proc, -(-len(texts) // _DOCUMENTS_PER_PROCESS))
        tokenised = texts.with_format("arrow").map(
            _tokenise,
            batched=True,
            batch_size=_BATCH,
            fn_kwargs={"tokenizer": tokenizer, "eos": tokenizer.eos_token_id if append_eos else None},
            remove_columns=["text"],
            num_proc=processes if processes > 1 else None,
            cache_file_name=str(Path(cache) / "tokens.arrow"),
            new_fingerprint="tokens",
            desc=f"Tokenising {split}",
        )
        meta = _write(work, tokenised.data, len(tokenizer))
        meta |= {
            "format": FORMAT,
            "files": [str(file) for file in files],
            "documents_read": len(texts),
            "vocabulary": len(tokenizer),
            "eos_id": tokenizer.eos_token_id,
            "pad_id": tokenizer.pad_token_id,
        }
        (work / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
        del texts, tokenised
    return Documents.open(path)


def _write(work: Path, table: Any, vocabulary: int) -> dict[str, Any]:
    """Writes tokens.bin and documents.npy from the arrow table {ids, file, line} without empty documents."""
    dtype, digest = token_dtype(vocabulary), hashlib.blake2b(digest_size=16)
    total, largest, parts = 0, -1, []
    with open(work / "tokens.bin", "wb") as out:
        for batch in table.to_batches():
            ids, lengths = (
                batch.column("ids").flatten().to_numpy(),
                batch.column("ids").value_lengths().to_numpy(),
            )
            kept = lengths > 0
            ends = total + np.cumsum(lengths[kept], dtype=np.int64)
            places = [batch.column(name).to_numpy()[kept].astype(np.int64) for name in ("file", "line")]
            parts.append(np.stack([ends, *places], axis=1))
            if len(ids):
                content = ids.astype(dtype).tobytes()
                out.write(content)
                digest.update(content)
                total, largest = total + len(ids), max(largest, int(ids.max()))
    ends = np.concatenate(parts) if parts else np.empty((0, 3), np.int64)
    np.save(work / "documents.npy", ends)
    return {
        "dtype": np.dtype(dtype).name,
        "tokens": total,
        "documents": len(ends),
        "largest_token_id": largest,
        "tokens_digest": digest.hexdigest(),
    }

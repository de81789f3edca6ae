"""The files of an exported directory beside its weights: configs, tokenizer, templates, code, licence.

All these files are known before training: `other_files_of` reads the model's directory and says what differs or is left out.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwright.arch.model_files import FOREIGN_WEIGHTS, MODEL_FILES, OTHER_FILES, TOKENIZER_FILES, matching
from shardwright.config.schema import Model
from shardwright.errors import ModelError


@dataclass(frozen=True)
class OtherFiles:
    """The files of an export beside its weights.

    copied: source of each file, by its path in the export.
    config, generation: to write into config.json and generation_config.json; None: no such file.
    template: file that replaces every chat template of the tokenizer.
    lines: what differs from the model's directory, for the user.
    """

    copied: dict[str, Path]
    config: Any
    generation: dict[str, Any] | None
    template: Path | None
    lines: tuple[str, ...]

    def write(self, directory: Path) -> None:
        """Writes all these files into `directory`."""
        for name, source in self.copied.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, directory / name)
        if self.config is not None:
            self.config.save_pretrained(directory)
        if self.generation is not None:
            _write_json(directory / "generation_config.json", self.generation)
        if self.template is not None:
            _set_chat_template(directory, self.template)


def other_files_of(
    model: nn.Module, spec: Model, *, tokenizer: Path | None, chat_template: str | None, end_tokens: Sequence[int]
) -> OtherFiles:
    """The files beside the weights of `model`.

    tokenizer: directory of the tokenizer; None: that of the run file, else of the model.
    chat_template: file that replaces the tokenizer's templates.
    end_tokens: with which the model is trained to stop.
    """
    source = Path(spec.model_name_or_path)
    copied = {name: source / name for name in matching(source, OTHER_FILES)}
    own = spec.tokenizer_name_or_path
    tokenizer = tokenizer or (None if own is None else Path(own))
    named = tokenizer or source
    copied |= {name: named / name for name in matching(named, TOKENIZER_FILES)}
    if tokenizer is not None:
        copied |= {name: named / name for name in matching(named, ("*.py",)) if name not in copied}
    lines = list(_left_out(source, copied))
    if chat_template is not None:
        extra = [name for name in copied if name.startswith("additional_chat_templates/")]
        for name in extra:
            del copied[name]
        if extra:
            lines.append(f"not exported: {', '.join(extra)}; data.chat_template replaces every template")
    written, generation, config = None, None, getattr(model, "config", None)
    if config is not None and hasattr(config, "save_pretrained"):
        architecture = type(model).__name__.removeprefix("FSDP")  # `fully_shard` puts its own class in front
        written = _written_config(config, source, next(model.parameters()).dtype, architecture)
        generation, more = _generation(source, written)
        lines += [*more, *_with_ends(written, generation, end_tokens)]
    template = None if chat_template is None else Path(chat_template)
    return OtherFiles(copied, written, generation, template, tuple(lines))


def _left_out(source: Path, copied: dict[str, Path]) -> Iterator[str]:
    if not source.is_dir():
        return
    known = {*copied, *matching(source, (*FOREIGN_WEIGHTS, *MODEL_FILES, *TOKENIZER_FILES))}
    hidden = (path for path in source.iterdir() if not path.name.startswith("."))
    names = sorted(path.name + ("/" if path.is_dir() else "") for path in hidden if path.name not in known)
    if names := [n for n in names if not any(name.startswith(n) for name in known)]:
        yield f"not exported from {source}: {', '.join(names)}"


def _written_config(config: Any, source: Path, dtype: torch.dtype, architecture: str) -> Any:
    """The config that the model was built from, with the cache as it was there."""
    written: Any = copy.deepcopy(config)
    written.architectures = [architecture]
    written.dtype = dtype
    if hasattr(written, "use_cache"):
        file = source / "config.json"
        values = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        written.use_cache = values.get("use_cache", type(written)().use_cache)
    return written


def _generation(source: Path, config: Any) -> tuple[dict[str, Any] | None, list[str]]:
    """(values of generation_config.json or None, lines). Takes the settings of generation out of `config`.

    Older models have them there. Transformers loads such a config, and refuses to write it.
    """
    file, lines = source / "generation_config.json", []
    values: dict[str, Any] | None = None
    if file.is_file():
        values = _read_json(file)
        idle = [key for key in ("temperature", "top_p", "top_k") if values.get(key) not in (None, *_NEUTRAL[key])]
        if idle and values.get("do_sample") is False:
            lines.append(
                f"{file} sets do_sample false and {', '.join(idle)}, which then have no effect; the file is exported unchanged"
            )
    moved = _settings_in(config, source / "config.json")
    if moved and values is not None:
        lines.append(
            f"not exported: {', '.join(moved)} of {source / 'config.json'}; generation_config.json replaces them"
        )
    elif moved:
        tokens = ("bos_token_id", "eos_token_id", "pad_token_id")
        kept = {key: getattr(config, key, None) for key in tokens}
        values = moved | {key: value for key, value in kept.items() if value is not None}
        lines.append(f"exported in generation_config.json instead of config.json: {', '.join(moved)}")
    return values, lines


def _settings_in(config: Any, file: Path) -> dict[str, Any]:
    """Settings of generation in the config.json of the model, without idle ones; takes all of them out of `config`."""
    from transformers import GenerationConfig

    stored = _read_json(file) if file.is_file() else {}
    found = config._get_generation_parameters()
    for key in found:
        delattr(config, key)
    own, known, plain = (
        config.to_dict(),
        GenerationConfig().to_dict(),
        GenerationConfig._get_default_generation_params(),
    )
    found |= {key: stored[key] for key in stored if key in known and key not in own}
    return {key: value for key, value in sorted(found.items()) if value is not None and value != plain.get(key)}


_NEUTRAL = {"temperature": (1.0,), "top_p": (1.0,), "top_k": (50,)}


def _with_ends(config: Any, generation: dict[str, Any] | None, ends: Sequence[int]) -> Iterator[str]:
    """Adds the end tokens of training to `eos_token_id`, where generation looks for end tokens, and gives a line."""
    text = config.get_text_config(decoder=True)
    owner = config if getattr(config, "eos_token_id", None) is not None else text
    known = {"config.json": getattr(owner, "eos_token_id", None)}
    if generation is not None:
        known["generation_config.json"] = generation.get("eos_token_id")
    changed: dict[str, int | list[int]] = {}
    added: list[int] = []
    for name, value in known.items():
        own = [] if value is None else value if isinstance(value, list) else [value]
        if missing := [end for end in ends if end not in own]:
            every = [*own, *missing]
            changed[name] = every[0] if len(every) == 1 else every
            added = added or missing
    if "config.json" in changed:
        owner.eos_token_id = changed["config.json"]
    if generation is not None and "generation_config.json" in changed:
        generation["eos_token_id"] = changed["generation_config.json"]
    if added:
        yield (
            f"exported with end token {' and '.join(map(str, added))} added to eos_token_id of {' and '.join(changed)}: "
            "training teaches the model to stop with it"
        )


def _read_json(file: Path) -> dict[str, Any]:
    why, fix = "The file is exported with the model.", "Repair or remove the file."
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}.", why, fix) from None
    if not isinstance(values, dict):
        raise ModelError(f"{file} is not a JSON object.", why, fix)
    return values


def _write_json(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _set_chat_template(directory: Path, template: Path) -> None:
    """Makes `template` the only chat template of the tokenizer in `directory`."""
    (directory / "chat_template.json").unlink(missing_ok=True)
    config = directory / "tokenizer_config.json"
    if config.is_file():
        values = _read_json(config)
        if values.pop("chat_template", None) is not None:
            _write_json(config, values)
    shutil.copyfile(template, directory / "chat_template.jinja")

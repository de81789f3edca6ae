"""From YAML, overrides and defaults to one `RunFile`, remembering where every value came from."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from shardwright.config.schema import RunFile, Source
from shardwright.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class Loaded:
    """A checked run file. `origin` maps each dotted key to `run.yaml:7`, `--training.max_steps` or `default`."""

    run: RunFile
    origin: dict[str, str]

    def to_yaml(self, origins: bool = False) -> str:
        """The resolved run file; with `origins`, each line ends in a comment that says where the value came from."""
        lines = []
        for section in sections():
            lines.append(f"{section}:")
            for key, value in getattr(self.run, section).model_dump().items():
                text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10**6)
                flow = text.removesuffix("\n").removesuffix("\n...")
                line = f"  {key}: {flow}"
                lines.append(f"{line:<56}  # {self.origin[f'{section}.{key}']}" if origins else line)
        return "\n".join(lines) + "\n"

    def settings(self) -> dict[str, Any]:
        """{dotted key: value} of the whole run file."""
        return {f"{name}.{key}": value for name in sections() for key, value in getattr(self.run, name)}

    def to_json(self) -> str:
        """Run file and origins, for a process that this one starts."""
        return json.dumps({"run": self.run.model_dump(), "origin": self.origin})

    @classmethod
    def from_json(cls, text: str) -> Loaded:
        """The inverse of `to_json`."""
        values = json.loads(text)
        return cls(RunFile.model_validate(values["run"]), values["origin"])

    def replaced(self, values: dict[str, Any], origin: str) -> Loaded:
        """This run with {dotted key: value} changed, checked again; `origin` is where the new values come from."""
        data = self.run.model_dump()
        for full, value in values.items():
            section, key = full.split(".")
            data[section][key] = value
        return Loaded(_validate(data, self.origin), {**self.origin, **dict.fromkeys(values, origin)})


class _Loader(yaml.SafeLoader):
    """Safe YAML in which 1e-4 is a number, only true and false are booleans, and a key given twice is an error."""


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern) for tag, pattern in rules if tag not in ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:float")
    ]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:(?:\d[\d_]*\.\d*|\.\d+)(?:[eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.(?:inf|nan))$"),
    list("-+0123456789."),
)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if tag != "tag:yaml.org,2002:int"]
    for first, rules in _Loader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(  # not YAML 1.1's 010 (eight) and 1:30 (ninety)
    "tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][\d_]*|0x[\da-fA-F_]+)$"), list("-+0123456789")
)


class _Dumper(yaml.SafeDumper):
    """Quotes the strings that `_Loader` would read as something else."""


_Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def _refuse_twice(node: yaml.Node, where: str, path: str) -> None:
    """Raises `ConfigError` for a key given twice anywhere below `node`."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_twice(item, where, path)
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key_node, value_node in node.value:
            full = f"{path}.{key_node.value}" if path else str(key_node.value)
            if full in seen:
                raise ConfigError(
                    f"{where}:{key_node.start_mark.line + 1}: `{full}` is given twice.",
                    "Only one of the two could take effect.",
                    "Remove one.",
                )
            seen.add(full)
            _refuse_twice(value_node, where, full)


def _mapping(node: yaml.Node, where: str, path: str, origin: dict[str, str]) -> dict[str, Any]:
    """The mapping under `node`; records `file:line` of each key of the first two levels in `origin`."""
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{where}: {path or 'the run file'} must be a mapping of keys to values.")
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = str(key_node.value)
        full, line = f"{path}.{key}" if path else key, key_node.start_mark.line + 1
        origin[full] = f"{where}:{line}"
        if not path and key in sections() and isinstance(value_node, yaml.MappingNode):
            result[key] = _mapping(value_node, where, key, origin)
        else:
            loader = _Loader("")
            result[key] = loader.construct_document(value_node)
    return result


def _value(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)


def read_settings(text: str) -> dict[str, Any]:
    """{dotted key: value} of a resolved run file (`Loaded.to_yaml`), of this version or another.

    Raises `ConfigError` where it is none.
    """
    try:
        data = yaml.load(text, Loader=_Loader) or {}
        return {f"{name}.{key}": value for name, part in data.items() for key, value in (part or {}).items()}
    except (yaml.YAMLError, AttributeError) as error:
        raise ConfigError(f"The saved run file cannot be read: {' '.join(str(error).split())}.") from None


@cache
def sections() -> dict[str, type[BaseModel]]:
    """Section name -> its model, in the order of the run file."""
    return {name: field.annotation for name, field in RunFile.model_fields.items()}  # type: ignore[misc]


@cache
def keys() -> tuple[str, ...]:
    """Every dotted key of the run file."""
    return tuple(f"{section}.{key}" for section, model in sections().items() for key in model.model_fields)


def _refuse_unknown(full: str, where: str) -> ConfigError:
    """The error for a key that the schema does not have: a wrong section, a typing error, or neither."""
    section, _, key = full.partition(".")
    what = f"{where}: `{full}` is not a key of the run file."
    if not key:
        homes = [name for name in keys() if name.endswith(f".{section}")]
        if homes:
            return ConfigError(what, "", f"It belongs into a section: `{homes[0]}`.")
        return ConfigError(what, "", did_you_mean(section, sections()))
    homes = [name for name in keys() if name.endswith(f".{key}")]
    if homes:
        return ConfigError(what, "", f"That key stands in another section: `{homes[0]}`.")
    if section in sections():
        own = list(sections()[section].model_fields)
        hint = did_you_mean(key, own)
        if hint.startswith("Did"):
            return ConfigError(what, "", hint.replace("`", f"`{section}.", 1))
        elsewhere = did_you_mean(full, keys())
        return ConfigError(
            what, "", elsewhere if elsewhere.startswith("Did") else f"Valid in `{section}`: {', '.join(own)}."
        )
    return ConfigError(what, "", did_you_mean(full, keys()))


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """`--section.key value` or `--section.key=value` pairs as {dotted key: value}; values are read as YAML.

    Raises `ConfigError` for anything that is no such pair.
    """
    result: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or "." not in word.split("=", 1)[0]:
            hint = did_you_mean(word.lstrip("-").split("=")[0].replace("-", "_"), [key.split(".")[1] for key in keys()])
            raise ConfigError(
                f"`{word}` is no option and no override.", "", f"Overrides read --section.key value. {hint}".strip()
            )
        name, given, text = word[2:].partition("=")
        if not given:
            if not rest or (rest[0].startswith("--") and "." in rest[0]):
                raise ConfigError(f"`{word}` has no value.", "", f"Write {word} VALUE.")
            text = rest.pop(0)
        if name in result:
            raise ConfigError(f"`--{name}` is given twice.", "Only one of the two could take effect.", "Remove one.")
        try:
            result[name] = _value(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"`--{name} {text}` is not a YAML value.", str(error).splitlines()[0]) from None
    return result


def _describe(error: Any, origin: dict[str, str], data: dict[str, Any]) -> ConfigError:
    """One pydantic error as what, why and fix."""
    path = [str(part) for part in error["loc"] if part != "source"]
    full = ".".join(path[:2])
    where = origin.get(full) or origin.get(path[0]) or "run file"
    if len(path) > 3:
        return _describe_entry(error, f"{where}: `{full}[{path[2]}].{path[3]}`")
    if error["type"] == "extra_forbidden":
        return _refuse_unknown(full, where)
    if error["type"] == "missing":
        return ConfigError(
            f"{where}: `{full}` is missing.",
            "This key has no default.",
            f"Add it under `{path[0]}:`." if len(path) > 1 else "",
        )
    field = sections()[path[0]].model_fields[path[1]] if full in keys() else None
    meaning = f"It means: {field.description}." if field is not None and field.description else ""
    given = error["input"]
    if not isinstance(given, str | int | float | bool | list) and given is not None:
        given = "a mapping"
    return ConfigError(f"{where}: `{full}` = {given!r}: {error['msg'][0].lower()}{error['msg'][1:]}.", "", meaning)


def _describe_entry(error: Any, what: str) -> ConfigError:
    """An error in a mapping that stands in a list, such as an entry of data.train."""
    if error["type"] == "extra_forbidden":
        hint = did_you_mean(str(error["loc"][-1]), Source.model_fields)
        return ConfigError(f"{what} is not a key of a source.", "", hint)
    if error["type"] == "missing":
        return ConfigError(f"{what} is missing.", "This key has no default.")
    given = error["input"] if isinstance(error["input"], str | int | float | bool) else "a mapping or list"
    return ConfigError(f"{what} = {given!r}: {error['msg'][0].lower()}{error['msg'][1:]}.")


def _validate(data: dict[str, Any], origin: dict[str, str]) -> RunFile:
    try:
        return RunFile.model_validate(data)
    except ValidationError as failure:
        seen: dict[str, ConfigError] = {}
        for error in failure.errors(include_url=False):
            seen.setdefault(".".join(str(part) for part in error["loc"][:2]), _describe(error, origin, data))
        first, *others = seen.values()
        if not others:
            raise first from None
        raise ConfigError("\n".join(str(error) for error in seen.values())) from None


def load_run_file(path: str | Path | None, overrides: dict[str, Any] | None = None, name: str | None = None) -> Loaded:
    """The run file at `path` with `overrides` ({dotted key: value}) on top, checked against the schema.

    `path` None starts from nothing but the overrides. Raises `ConfigError` naming file, line, key and the nearest
    valid key.
    """
    data: dict[str, Any] = {}
    origin: dict[str, str] = {}
    if path is not None:
        where = name or str(path)
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"{where} cannot be read: {error.strerror}.", "", "Name a run file; examples/ has some."
            ) from None
        try:
            node = yaml.compose(text, Loader=_Loader)
        except yaml.YAMLError as error:
            raise ConfigError(f"{where} is not YAML: {' '.join(str(error).split())}.") from None
        if node is None:
            raise ConfigError(f"{where} is empty.", "", "Copy one of examples/.")
        _refuse_twice(node, where, "")
        data = _mapping(node, where, "", origin)
    for full, value in (overrides or {}).items():
        if full not in keys():
            raise _refuse_unknown(full, f"--{full}")
        section, key = full.split(".")
        existing = data.setdefault(section, {})
        if not isinstance(existing, dict):
            raise ConfigError(f"{origin[section]}: `{section}` must be a mapping of keys to values.")
        existing[key] = value
        origin[full] = f"--{full}"
    run = _validate(data, origin)
    return Loaded(run, {full: origin.get(full, "default") for full in keys()})

"""The device that `--device` names: one of the catalogue, or one that a hardware file describes."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args

from shardwright.errors import ConfigError, did_you_mean
from shardwright.planner.catalogue import ALIASES, CATALOGUE, DEFAULT_EFFICIENCY
from shardwright.planner.device import Device, DeviceKind, Node

NEEDED = ("kind", "memory_bytes", "memory_bandwidth", "peak_flops", "node")
SOURCES = ("source", "fitted", "sources")
"""Fields that say where figures are from: the file's `source` fills them for all figures that the file gives."""


def find_device(name: str) -> Device:
    """The device of this name (`h100-sxm-80gb`, `h100`), or of the hardware file at this path.

    Raises `ConfigError` with the nearest name when there is none.
    """
    key = name.lower().replace("_", "-").replace(" ", "-")
    key = ALIASES.get(key, key)
    if key in CATALOGUE:
        return CATALOGUE[key]
    if name.endswith((".yaml", ".yml")):
        return _read(Path(name))
    raise ConfigError(
        f"`{name}` is not in the hardware catalogue.",
        did_you_mean(key, CATALOGUE),
        "For another device give the path of a hardware file (name.yaml), which `shardwright doctor` writes.",
    )


def _read(path: Path) -> Device:
    """The device that a hardware file describes: a YAML mapping with the fields of `Device`, `Node` and `Efficiency` as keys.

    `like` names the device that the figures come from which the file does not give. `source` says where the file's figures
    are from. Unknown keys are refused with the nearest known key.
    """
    if not path.is_file():
        raise ConfigError(
            f"The hardware file {path} does not exist.", "", "Give a known device or the path of a YAML file."
        )
    import yaml  # only here: planning for a device of the catalogue does not load it

    data = yaml.safe_load(path.read_text())
    given = dict(data) if isinstance(data, dict) else data
    source, like = path.name, None
    if isinstance(given, dict):
        source, like = str(given.pop("source", source)), given.pop("like", None)
    empty = Device(path.stem, 0, 0.0, {}, Node(1, 0.0, 0.0), 55e9, None, DEFAULT_EFFICIENCY)
    base = empty if like is None else replace(find_device(str(like)), name=path.stem)
    device: Device = _changed(path, "", base, given, source)
    missing = [key for key in NEEDED if key not in given]
    if like is None and missing:
        raise ConfigError(
            f"{path} does not give {', '.join(missing)}.",
            "Without `like` these keys have no value.",
            "Add the keys or `like: h100-sxm-80gb`, or let `shardwright doctor` write the file.",
        )
    return device


def _changed(path: Path, prefix: str, base: Any, data: Any, source: str) -> Any:
    """`base`, a dataclass, with the values of `data`; each value is of the type that the field has in `base`."""
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: {prefix.rstrip('.') or 'a hardware file'} is a mapping of keys to values.")
    known, values = [f.name for f in fields(base) if f.name not in SOURCES], dict[str, Any]()
    for key, value in data.items():
        name = f"{prefix}{key}"
        if key not in known:
            raise ConfigError(f"{path}: `{name}` is not a key of a hardware file.", did_you_mean(str(key), known))
        old = getattr(base, key)
        if is_dataclass(old):
            values[key] = _changed(path, f"{name}.", old, value, source)
        elif isinstance(old, dict):
            values[key] = old | {str(dtype): _number(path, f"{name}.{dtype}", rate) for dtype, rate in value.items()}
        elif key == "kind" and value not in get_args(DeviceKind):
            raise ConfigError(f"{path}: `kind` is {value!r}.", "", "Valid: cuda, cpu.")
        elif isinstance(old, str):
            values[key] = str(value)
        else:
            number = _number(path, name, value)
            values[key] = int(number) if isinstance(old, int) else number
    label: dict[str, Any] = {field: source for field in ("source", "fitted") if hasattr(base, field)}
    if isinstance(base, Device):
        label = {"sources": base.sources | dict.fromkeys(values, source)}
    return replace(base, **values, **label)


def _number(path: Path, key: str, value: object) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ConfigError(
            f"{path}: `{key}` is {value!r}, not a number.",
            "",
            "Give bytes, bytes/s, FLOP/s or seconds, for example 3.35e12.",
        ) from None
    if number <= 0:
        raise ConfigError(f"{path}: `{key}` is {value}, but must be more than 0.")
    return number

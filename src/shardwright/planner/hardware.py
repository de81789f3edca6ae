"""Devices by name from the catalogue, or described by people's own hardware files."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from shardwright.errors import ConfigError, did_you_mean
from shardwright.planner.catalogue import ALIASES, CATALOGUE, DEFAULT_EFFICIENCY
from shardwright.planner.device import Device, Efficiency, Node


def find_device(name: str) -> Device:
    """The device of this name (`h100-sxm-80gb`, `h100`), or of the hardware file at this path.

    Raises `ConfigError` with the nearest name when there is none.
    """
    key = name.lower().replace("_", "-").replace(" ", "-")
    key = ALIASES.get(key, key)
    if key in CATALOGUE:
        return CATALOGUE[key]
    if name.endswith((".yaml", ".yml")):
        return read_hardware(Path(name))
    raise ConfigError(
        f"`{name}` is not in the hardware catalogue.",
        did_you_mean(key, CATALOGUE),
        f"Known: {', '.join(CATALOGUE)}. For another device give a hardware file (name.yaml).",
    )


def read_hardware(path: Path) -> Device:
    """A device described by a YAML file: `like` names the one whose figures hold where the file gives none.

    Keys: name, like, memory_bytes, memory_bandwidth, peak_flops, host_bandwidth, matmul_measured, source,
    node (devices, link_bandwidth, network_bandwidth, link_latency, network_latency, transfer_load) and efficiency. Unknown
    keys are refused with the nearest known one.
    """
    if not path.is_file():
        raise ConfigError(
            f"The hardware file {path} does not exist.",
            "",
            "Give a device of the catalogue or the path of a YAML file.",
        )
    import yaml  # only here: planning on a device of the catalogue does not pay for it

    data = yaml.safe_load(path.read_text())
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a hardware file is a mapping of keys to values.")
    base = find_device(str(data.pop("like"))) if "like" in data else None
    source = str(data.pop("source", path.name))
    known = [f.name for f in fields(Device) if f.name != "sources"]
    _refuse_unknown(path, "", data, [*known, "like", "source"])
    if base is None:
        missing = [name for name in ("memory_bytes", "memory_bandwidth", "peak_flops", "node") if name not in data]
        if missing:
            raise ConfigError(
                f"{path}: {', '.join(missing)} missing.",
                "Without `like` nothing else gives them.",
                "Add them or `like: h100-sxm-80gb`.",
            )
        base = Device(path.stem, 0, 0.0, {}, Node(1, 0.0, 0.0), 55e9, None, DEFAULT_EFFICIENCY)
    changed: dict[str, Any] = {
        key: _number(path, key, value)
        for key, value in data.items()
        if key not in ("name", "node", "efficiency", "peak_flops")
    }
    if "peak_flops" in data:
        changed["peak_flops"] = base.peak_flops | {
            str(k): _number(path, f"peak_flops.{k}", v) for k, v in data["peak_flops"].items()
        }
    for key, cls in (("node", Node), ("efficiency", Efficiency)):
        if key in data:
            names = [f.name for f in fields(cls) if f.name not in ("source", "fitted")]
            _refuse_unknown(path, f"{key}.", data[key], names)
            label = {"source": source} if cls is Node else {"fitted": source}
            values = {k: _number(path, f"{key}.{k}", v) for k, v in data[key].items()}
            if "devices" in values:
                values["devices"] = int(values["devices"])
            changed[key] = replace(getattr(base, key), **values, **label)
    if "memory_bytes" in changed:
        changed["memory_bytes"] = int(changed["memory_bytes"])
    sources = base.sources | dict.fromkeys(changed, source)
    return replace(base, name=str(data.get("name", path.stem)), sources=sources, **changed)


def _refuse_unknown(path: Path, prefix: str, data: dict[str, Any], known: list[str]) -> None:
    for key in data:
        if key not in known:
            raise ConfigError(
                f"{path}: `{prefix}{key}` is not a key of a hardware file.", did_you_mean(str(key), known)
            )


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

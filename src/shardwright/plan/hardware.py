"""Devices and nodes with the source of every figure, and people's own clusters from a YAML file.

Rates are dense (no 2:4 sparsity), bandwidths are in one direction, bytes are decimal as on the data sheets.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from shardwright.errors import ConfigError, did_you_mean
from shardwright.units import GB, GIB

TERA = 10**12


@dataclass(frozen=True)
class Efficiency:
    """What a device reaches of its data sheet. One set per device; see `plan/kernels.py` for the laws.

    matmul: fraction of the peak of a large matrix product in a training step (power limit and memory stalls included).
    wave: elements of the result at which half of that is reached (half a wave of output tiles); depth: the same for the
    inner dim. attention_ramp: keys at which a flash kernel reaches half its rate.
    attention_forward, attention_backward: fraction of the peak of the flash kernels at head width 128.
    bandwidth: fraction of the memory bandwidth that element-wise kernels and the optimizer reach.
    link: fraction of the link bandwidth that a large collective inside a node reaches; network: between nodes.
    fitted: the rows that these were fitted on, or the device they were taken over from.
    """

    matmul: float
    wave: float
    depth: float
    attention_forward: float
    attention_backward: float
    attention_ramp: float
    bandwidth: float
    link: float
    network: float
    fitted: str


@dataclass(frozen=True)
class Node:
    """How devices are joined: bandwidth per device and direction in bytes/s, latency per step in seconds.

    The latencies of the A100 and H100 nodes are fitted with the devices' efficiencies; those of other nodes are taken over.
    """

    devices: int
    link_bandwidth: float
    network_bandwidth: float
    link_latency: float = 13e-6
    network_latency: float = 50e-6
    source: str = ""


@dataclass(frozen=True, eq=False)
class Device:
    """One accelerator and the node it usually stands in.

    peak_flops: dense FLOP/s by dtype. host_bandwidth: bytes/s to host memory, one direction (for offload).
    matmul_measured: the best matrix product anyone published for it, FLOP/s, or None. sources: figure -> where it is from.
    """

    name: str
    memory_bytes: int
    memory_bandwidth: float
    peak_flops: dict[str, float]
    node: Node
    host_bandwidth: float = 55e9
    matmul_measured: float | None = None
    efficiency: Efficiency = field(default_factory=lambda: _LIKE_H100)
    sources: dict[str, str] = field(default_factory=dict)

    def peak(self, dtype: str) -> float:
        """Dense FLOP/s in `dtype`; fp16 and bf16 stand in for each other. Raises `ConfigError` when there is none."""
        other = {"bf16": "fp16", "fp16": "bf16"}.get(dtype, dtype)
        value = self.peak_flops.get(dtype) or self.peak_flops.get(other)
        if value is None:
            raise ConfigError(
                f"{self.name} has no {dtype} rate in the hardware catalogue.",
                f"It has {', '.join(self.peak_flops)}.",
                "Choose one of these as precision.param_dtype, or describe the device in a hardware file.",
            )
        return value


_ML = "stas00/ml-engineering, compute/accelerator/README.md and network/README.md at 744d01e"
_MAMF = "stas00/ml-engineering, maximum achievable matmul FLOPS table at 744d01e"


def _sheet(name: str, **more: str) -> dict[str, str]:
    return {
        "memory_bytes": name,
        "memory_bandwidth": name,
        "peak_flops": name,
        "host_bandwidth": "PCIe or C2C, " + _ML,
    } | more


def _rates(
    fp16: float, fp32: float, tf32: float | None = None, fp8: float | None = None, bf16: bool = True
) -> dict[str, float]:
    rates = {"fp16": fp16, "fp32": fp32, "fp64": fp32 / 2}
    if bf16:
        rates["bf16"] = fp16
    if tf32:
        rates["tf32"] = tf32
    if fp8:
        rates["fp8"] = fp8
    return {dtype: rate * TERA for dtype, rate in rates.items()}


_PCIE4, _PCIE5 = 31 * GB, 63 * GB
_NV2 = Node(8, 150 * GB, 12.5 * GB, source="DGX-1V: NVLink 2, 4 x 100 Gbit/s for 8 devices; " + _ML)
_NV3 = Node(8, 300 * GB, 25 * GB, 26e-6, 27e-6, source="DGX A100: NVLink 3, 8 x 200 Gbit/s; " + _ML)
_NV4 = Node(8, 450 * GB, 50 * GB, 13e-6, 86e-6, source="DGX H100: NVLink 4, 8 x 400 Gbit/s; " + _ML)
_NV5 = Node(8, 900 * GB, 50 * GB, 13e-6, 86e-6, source="DGX B200: NVLink 5, 8 x 400 Gbit/s; " + _ML)
_NVL72 = Node(
    72,
    900 * GB,
    50 * GB,
    13e-6,
    86e-6,
    source="GB200 NVL72: NVLink 5 over 72 devices, 400 Gbit/s each; " + _ML,
)
_XGMI = Node(8, 448 * GB, 50 * GB, source="MI300X platform: 7 xGMI links of 64 GB/s, 8 x 400 Gbit/s; " + _ML)
_BRIDGE = Node(
    2,
    300 * GB,
    50 * GB,
    source="H100 NVL: NVLink bridge of a pair, 600 GB/s both ways; NVIDIA H100 data sheet",
)
_PCI4 = Node(8, _PCIE4, 12.5 * GB, 10e-6, source="PCIe 4 x16, 100 Gbit/s each; " + _ML)
_PCI5 = Node(8, _PCIE5, 25 * GB, 10e-6, source="PCIe 5 x16, 200 Gbit/s each; " + _ML)

# The two fitted sets. Both devices' best published product is 0.87 and 0.80 of the peak (matmul_measured): the A100 comes
# close to it in training, the H100 does not, because 700 W do not feed its tensor cores at full clock on real data. The
# H100 also needs larger products to fill it (wave, depth). Attention of the A100 is from FlashAttention-2's figures
# (arXiv:2307.08691, figure 5), because no row of ours ran it there.
_A100 = Efficiency(0.85, 1e5, 16, 0.60, 0.50, 128, 0.76, 0.90, 0.92, "A100 rows of the calibration half")
_H100 = Efficiency(0.66, 1.05e6, 260, 0.37, 0.30, 128, 0.65, 0.50, 0.53, "H100 rows of the calibration half")
_H100_500W = replace(_H100, matmul=0.56, fitted="torchtitan rows of the calibration half: power limit 500 W")
_LIKE_A100 = replace(_A100, fitted="not fitted: taken over from the A100")
_LIKE_H100 = replace(_H100, fitted="not fitted: taken over from the H100")
# Where the best product is published, training is taken to reach the same share of it as on the fitted device: 0.98 of
# 0.869 on the A100, 0.82 of 0.803 on the H100.
_SCALED = "not fitted: taken over from the {}, matmul in proportion to the best published product"
_A100_PCIE = replace(_A100, matmul=0.79, fitted=_SCALED.format("A100"))
_B200 = replace(_H100, matmul=0.64, fitted=_SCALED.format("H100"))
_GB200 = replace(_H100, matmul=0.60, fitted=_SCALED.format("H100"))
_MI300X = replace(_H100, matmul=0.42, fitted=_SCALED.format("H100"))

_V100_SHEET = "NVIDIA V100 data sheet (January 2020)"
_A100_SHEET = "NVIDIA A100 data sheet (June 2021)"
_H100_SHEET = "NVIDIA H100 data sheet (2023)"
_H200_SHEET = "NVIDIA H200 data sheet (2023)"
_B200_SHEET = "NVIDIA DGX B200 data sheet (2024)"
_GB200_SHEET = "NVIDIA GB200 NVL72 data sheet (2024)"
_L40S_SHEET = "NVIDIA L40S data sheet (2023)"
_4090_SHEET = "NVIDIA Ada GPU architecture paper (2023): fp16 with fp32 accumulation"
_MI300X_SHEET = "AMD Instinct MI300X data sheet (2023)"

_A100_RATES = _rates(312, 19.5, 156)
_H100_RATES = _rates(989.4, 66.9, 494.7, 1978.9)
_MAMF_A100, _MAMF_H100 = 271.2 * TERA, 794.5 * TERA


def _catalogue() -> tuple[Device, ...]:
    """Every device. The memory is what the device reports as total, rounded to the sheet where that is not published."""
    mamf = {"matmul_measured": _MAMF}
    return (
        Device(
            "v100-sxm-16gb",
            16 * GIB,
            900 * GB,
            _rates(125, 15.7, bf16=False),
            _NV2,
            12 * GB,
            None,
            _LIKE_A100,
            _sheet(_V100_SHEET),
        ),
        Device(
            "v100-sxm-32gb",
            32 * GIB,
            900 * GB,
            _rates(125, 15.7, bf16=False),
            _NV2,
            12 * GB,
            None,
            _LIKE_A100,
            _sheet(_V100_SHEET),
        ),
        Device(
            "a100-pcie-40gb",
            40 * GIB,
            1555 * GB,
            _A100_RATES,
            _PCI4,
            25 * GB,
            252.9 * TERA,
            _A100_PCIE,
            _sheet(_A100_SHEET, **mamf),
        ),
        Device(
            "a100-sxm-40gb",
            40 * GIB,
            1555 * GB,
            _A100_RATES,
            _NV3,
            25 * GB,
            _MAMF_A100,
            _A100,
            _sheet(_A100_SHEET, **mamf),
        ),
        Device(
            "a100-pcie-80gb",
            80 * GIB,
            1935 * GB,
            _A100_RATES,
            _PCI4,
            25 * GB,
            252.9 * TERA,
            _A100_PCIE,
            _sheet(_A100_SHEET, **mamf),
        ),
        Device(
            "a100-sxm-80gb",
            80 * GIB,
            2039 * GB,
            _A100_RATES,
            _NV3,
            25 * GB,
            _MAMF_A100,
            _A100,
            _sheet(_A100_SHEET, **mamf),
        ),
        Device(
            "h100-pcie-80gb",
            80 * GIB,
            2000 * GB,
            _rates(756, 51, 378, 1513),
            _PCI5,
            55 * GB,
            None,
            _LIKE_H100,
            _sheet(_H100_SHEET),
        ),
        Device(
            "h100-sxm-80gb",
            80 * GIB,
            3350 * GB,
            _H100_RATES,
            _NV4,
            55 * GB,
            _MAMF_H100,
            _H100,
            _sheet(_H100_SHEET, **mamf),
        ),
        Device(
            "h100-sxm-96gb",
            96 * GIB,
            2400 * GB,
            _H100_RATES,
            _NV4,
            55 * GB,
            _MAMF_H100,
            _H100_500W,
            _sheet(
                "torchtitan benchmarks/llama3_h100_202412_torchtitan.md: 96 GB HBM2e, 2.4 TB/s, 500 W", **mamf
            ),
        ),
        Device(
            "h100-nvl-94gb",
            94 * GIB,
            3900 * GB,
            _rates(835, 60, 417, 1671),
            _BRIDGE,
            55 * GB,
            None,
            _LIKE_H100,
            _sheet(_H100_SHEET),
        ),
        Device(
            "h200-sxm-141gb",
            141 * GB,
            4800 * GB,
            _H100_RATES,
            _NV4,
            55 * GB,
            _MAMF_H100,
            _LIKE_H100,
            _sheet(_H200_SHEET, **mamf),
        ),
        Device(
            "b200-sxm-180gb",
            180 * GB,
            7700 * GB,
            _rates(2250, 75, 1125, 4500),
            _NV5,
            55 * GB,
            1745 * TERA,
            _B200,
            _sheet(_B200_SHEET, **mamf),
        ),
        Device(
            "gb200-186gb",
            186 * GB,
            8000 * GB,
            _rates(2500, 80, 1250, 5000),
            _NVL72,
            400 * GB,
            1822 * TERA,
            _GB200,
            _sheet(_GB200_SHEET, **mamf),
        ),
        Device(
            "mi300x-192gb",
            192 * GB,
            5300 * GB,
            _rates(1307.4, 163.4, 653.7, 2614.9),
            _XGMI,
            55 * GB,
            668.4 * TERA,
            _MI300X,
            _sheet(_MI300X_SHEET, **mamf),
        ),
        Device(
            "l40s-48gb",
            48 * GB,
            864 * GB,
            _rates(362, 91.6, 183, 733),
            _PCI4,
            25 * GB,
            None,
            _LIKE_A100,
            _sheet(_L40S_SHEET),
        ),
        Device(
            "rtx4090-24gb",
            24 * GIB,
            1008 * GB,
            _rates(165.2, 82.6, 82.6, 330.3),
            _PCI4,
            25 * GB,
            None,
            _LIKE_A100,
            _sheet(_4090_SHEET),
        ),
        Device(
            "cpu",
            16 * GIB,
            20 * GB,
            {"fp32": 95e9, "bf16": 210e9, "fp64": 45e9},
            Node(1, 1 * GB, 0.125 * GB, 50e-6, 100e-6, "default"),
            10 * GB,
            None,
            Efficiency(0.9, 1e3, 16, 0.5, 0.5, 16, 0.8, 0.8, 0.8, "default, not measured"),
            _sheet(
                "default for one core, not this machine: run `shardwright doctor` and give its hardware file"
            ),
        ),
    )


CATALOGUE = {device.name: device for device in _catalogue()}
_ALIASES = {
    "v100": "v100-sxm-32gb",
    "a100": "a100-sxm-80gb",
    "a100-40gb": "a100-sxm-40gb",
    "a100-80gb": "a100-sxm-80gb",
    "h100": "h100-sxm-80gb",
    "h100-80gb": "h100-sxm-80gb",
    "h100-pcie": "h100-pcie-80gb",
    "h100-nvl": "h100-nvl-94gb",
    "h200": "h200-sxm-141gb",
    "b200": "b200-sxm-180gb",
    "gb200": "gb200-186gb",
    "mi300x": "mi300x-192gb",
    "l40s": "l40s-48gb",
    "4090": "rtx4090-24gb",
    "rtx4090": "rtx4090-24gb",
}


def find_device(name: str) -> Device:
    """The device of this name (`h100-sxm-80gb`, `h100`), or of the hardware file at this path.

    Raises `ConfigError` with the nearest name when there is none.
    """
    key = name.lower().replace("_", "-").replace(" ", "-")
    key = _ALIASES.get(key, key)
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
    node (devices, link_bandwidth, network_bandwidth, link_latency, network_latency) and efficiency. Unknown keys are
    refused with the nearest known one.
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
        missing = [
            name for name in ("memory_bytes", "memory_bandwidth", "peak_flops", "node") if name not in data
        ]
        if missing:
            raise ConfigError(
                f"{path}: {', '.join(missing)} missing.",
                "Without `like` nothing else gives them.",
                "Add them or `like: h100-sxm-80gb`.",
            )
        base = Device(path.stem, 0, 0.0, {}, Node(1, 0.0, 0.0))
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
    sources = base.sources | {key: source for key in changed}
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

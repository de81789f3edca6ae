"""The hardware catalogue, with the source of every figure."""

from __future__ import annotations

from dataclasses import replace

from shardwright.planner.device import Device, Efficiency, Node
from shardwright.units import GB, GIB

TERA = 10**12

_ML = "stas00/ml-engineering, compute/accelerator/README.md and network/README.md at 744d01e"
_MAMF = "stas00/ml-engineering, maximum achievable matmul FLOPS table at 744d01e"


def _rates(fp16: float, fp32: float, tf32: float = 0, fp8: float = 0, bf16: bool = True) -> dict[str, float]:
    """FLOP/s by dtype from TFLOP/s; a dtype at 0 is left out."""
    rates = {"fp16": fp16, "fp32": fp32, "fp64": fp32 / 2, "bf16": fp16 * bf16, "tf32": tf32, "fp8": fp8}
    return {dtype: rate * TERA for dtype, rate in rates.items() if rate}


def _node(devices: int, link: float, network: float, source: str, step: float = 13e-6, hop: float = 50e-6) -> Node:
    """Bandwidths in GB/s; step and hop are the latencies of links and network."""
    return Node(devices, link * GB, network * GB, step, hop, f"{source}; {_ML}")


_NV2 = _node(8, 150, 12.5, "DGX-1V: NVLink 2, 4 x 100 Gbit/s for 8 devices")
_NV3 = _node(8, 300, 25, "DGX A100: NVLink 3, 8 x 200 Gbit/s", 26e-6, 27e-6)
_NV4 = _node(8, 450, 50, "DGX H100: NVLink 4, 8 x 400 Gbit/s", 13e-6, 86e-6)
_NV5 = _node(8, 900, 50, "DGX B200: NVLink 5, 8 x 400 Gbit/s", 13e-6, 86e-6)
_NVL72 = _node(72, 900, 50, "GB200 NVL72: NVLink 5 over 72 devices, 400 Gbit/s each", 13e-6, 86e-6)
_XGMI = _node(8, 448, 50, "MI300X platform: 7 xGMI links of 64 GB/s, 8 x 400 Gbit/s")
_BRIDGE = _node(2, 300, 50, "H100 NVL data sheet: NVLink bridge of a pair, 600 GB/s both ways")
_PCI4 = _node(8, 31, 12.5, "PCIe 4 x16, 100 Gbit/s each", 10e-6, 50e-6)
_PCI5 = _node(8, 63, 25, "PCIe 5 x16, 200 Gbit/s each", 10e-6, 50e-6)

# Two sets are fitted. The best published product is 0.87 of the peak on the A100 and 0.80 on the H100. The A100 comes close
# to its best product in training; the H100 does not, because 700 W do not feed its tensor cores at full clock on real data.
# The H100 also needs larger products to fill it (wave, depth). Attention of the A100 is from FlashAttention-2's figures
# (arXiv:2307.08691, figure 5), because no measured run used it on the A100.
_A100 = Efficiency(0.85, 1e5, 16, 0.60, 0.50, 128, 0.76, 0.90, 0.92, "fitted on published A100 runs")
_H100 = Efficiency(0.66, 1.05e6, 260, 0.37, 0.30, 128, 0.65, 0.50, 0.53, "fitted on published H100 runs")
_H100_500W = replace(_H100, matmul=0.56, fitted="fitted on published torchtitan runs at a power limit of 500 W")
_LIKE_A100 = replace(_A100, fitted="not fitted: taken over from the A100")
_LIKE_H100 = replace(_H100, fitted="not fitted: taken over from the H100")
# Where the best product is published, training is taken to reach the same share of it as on the fitted device: 0.98 of 0.869
# on the A100, 0.82 of 0.803 on the H100.
_SCALED = "not fitted: taken over from the {}, matmul in proportion to the best published product"
_A100_PCIE = replace(_A100, matmul=0.79, fitted=_SCALED.format("A100"))
_B200 = replace(_H100, matmul=0.64, fitted=_SCALED.format("H100"))
_GB200 = replace(_H100, matmul=0.60, fitted=_SCALED.format("H100"))
_MI300X = replace(_H100, matmul=0.42, fitted=_SCALED.format("H100"))

_V100_SHEET = "NVIDIA V100 data sheet (January 2020)"
_A100_SHEET = "NVIDIA A100 data sheet (June 2021)"
_H100_SHEET = "NVIDIA H100 data sheet (2023)"
_META = "torchtitan benchmarks/llama3_h100_202412_torchtitan.md: 96 GB HBM2e, 2.4 TB/s, 500 W"
_H200_SHEET = "NVIDIA H200 data sheet (2023)"
_B200_SHEET = "NVIDIA DGX B200 data sheet (2024)"
_GB200_SHEET = "NVIDIA GB200 NVL72 data sheet (2024)"
_L40S_SHEET = "NVIDIA L40S data sheet (2023)"
_ADA = "NVIDIA Ada GPU architecture paper (2023): fp16 with fp32 accumulation"
_MI300X_SHEET = "AMD Instinct MI300X data sheet (2023)"
_GUESS = "default for one core, not this machine: run `shardwright doctor` and give its hardware file"

_V100_RATES = _rates(125, 15.7, bf16=False)
_A100_RATES = _rates(312, 19.5, 156)
_H100_RATES = _rates(989.4, 66.9, 494.7, 1978.9)
_MI300X_RATES = _rates(1307.4, 163.4, 653.7, 2614.9)

# name, memory (bytes), memory bandwidth (GB/s), rates, node, host bandwidth (GB/s), best published product (TFLOP/s, 0: none),
# efficiency, source
_Row = tuple[str, int, float, dict[str, float], Node, float, float, Efficiency, str]
_GPUS: tuple[_Row, ...] = (
    ("v100-sxm-16gb", 16 * GIB, 900, _V100_RATES, _NV2, 12, 0, _LIKE_A100, _V100_SHEET),
    ("v100-sxm-32gb", 32 * GIB, 900, _V100_RATES, _NV2, 12, 0, _LIKE_A100, _V100_SHEET),
    ("a100-pcie-40gb", 40 * GIB, 1555, _A100_RATES, _PCI4, 25, 252.9, _A100_PCIE, _A100_SHEET),
    ("a100-sxm-40gb", 40 * GIB, 1555, _A100_RATES, _NV3, 25, 271.2, _A100, _A100_SHEET),
    ("a100-pcie-80gb", 80 * GIB, 1935, _A100_RATES, _PCI4, 25, 252.9, _A100_PCIE, _A100_SHEET),
    ("a100-sxm-80gb", 80 * GIB, 2039, _A100_RATES, _NV3, 25, 271.2, _A100, _A100_SHEET),
    ("h100-pcie-80gb", 80 * GIB, 2000, _rates(756, 51, 378, 1513), _PCI5, 55, 0, _LIKE_H100, _H100_SHEET),
    ("h100-sxm-80gb", 80 * GIB, 3350, _H100_RATES, _NV4, 55, 794.5, _H100, _H100_SHEET),
    ("h100-sxm-96gb", 96 * GIB, 2400, _H100_RATES, _NV4, 55, 794.5, _H100_500W, _META),
    ("h100-nvl-94gb", 94 * GIB, 3900, _rates(835, 60, 417, 1671), _BRIDGE, 55, 0, _LIKE_H100, _H100_SHEET),
    ("h200-sxm-141gb", 141 * GB, 4800, _H100_RATES, _NV4, 55, 794.5, _LIKE_H100, _H200_SHEET),
    ("b200-sxm-180gb", 180 * GB, 7700, _rates(2250, 75, 1125, 4500), _NV5, 55, 1745, _B200, _B200_SHEET),
    ("gb200-186gb", 186 * GB, 8000, _rates(2500, 80, 1250, 5000), _NVL72, 400, 1822, _GB200, _GB200_SHEET),
    ("mi300x-192gb", 192 * GB, 5300, _MI300X_RATES, _XGMI, 55, 668.4, _MI300X, _MI300X_SHEET),
    ("l40s-48gb", 48 * GB, 864, _rates(362, 91.6, 183, 733), _PCI4, 25, 0, _LIKE_A100, _L40S_SHEET),
    ("rtx4090-24gb", 24 * GIB, 1008, _rates(165.2, 82.6, 82.6, 330.3), _PCI4, 25, 0, _LIKE_A100, _ADA),
)
_SHEET_FIGURES = ("memory_bytes", "memory_bandwidth", "peak_flops")


def _gpu(row: _Row) -> Device:
    name, memory, bandwidth, rates, node, host, best, efficiency, sheet = row
    sources = dict.fromkeys(_SHEET_FIGURES, sheet) | {"host_bandwidth": f"PCIe or C2C; {_ML}"}
    if best:
        sources["matmul_measured"] = _MAMF
    return Device(name, memory, bandwidth * GB, rates, node, host * GB, best * TERA or None, efficiency, sources)


_CPU = Device(
    "cpu", 16 * GIB, 20 * GB, {"fp32": 95e9, "bf16": 210e9, "fp64": 45e9},
    Node(1, 1 * GB, 0.125 * GB, 50e-6, 100e-6, "default"), 10 * GB, None,
    Efficiency(0.9, 1e3, 16, 0.5, 0.5, 16, 0.8, 0.8, 0.8, "default, not measured"),
    dict.fromkeys((*_SHEET_FIGURES, "host_bandwidth"), _GUESS), "cpu",
)  # fmt: skip

CATALOGUE = {device.name: device for device in (*map(_gpu, _GPUS), _CPU)}
DEFAULT_EFFICIENCY = _LIKE_H100

ALIASES = {
    "v100": "v100-sxm-32gb", "h200": "h200-sxm-141gb", "b200": "b200-sxm-180gb", "gb200": "gb200-186gb",
    "a100": "a100-sxm-80gb", "a100-40gb": "a100-sxm-40gb", "a100-80gb": "a100-sxm-80gb",
    "h100": "h100-sxm-80gb", "h100-80gb": "h100-sxm-80gb", "h100-pcie": "h100-pcie-80gb", "h100-nvl": "h100-nvl-94gb",
    "mi300x": "mi300x-192gb", "l40s": "l40s-48gb", "4090": "rtx4090-24gb", "rtx4090": "rtx4090-24gb",
}  # fmt: skip

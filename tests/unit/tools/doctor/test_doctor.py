"""The doctor's constants from seconds that follow the planner's laws exactly, and the file that `plan` reads back."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.planner.hardware import find_device
from shardwright.planner.kernels import attention_seconds, matmul_seconds
from shardwright.planner.network import all_reduce_times, gather_seconds, group_of
from shardwright.tools.doctor.fit import Link, Measured, Product, Transfer, fit_link, fit_products
from shardwright.tools.doctor.hardware_file import fitted, hardware, to_yaml
from shardwright.tools.doctor.machine import (
    cores_finding,
    machine_findings,
    shared_memory_finding,
    sync_finding,
)
from shardwright.tools.doctor.verb import measured_findings

PEAK, WAVE, DEPTH = 2e11, 5e4, 60.0
SIZES = ((64, 64, 64), (256, 1024, 256), (1024, 1024, 1024), (2048, 512, 128), (512, 512, 2048))


def product(m: int, n: int, k: int) -> Product:
    rate = PEAK * m * n / (m * n + WAVE) * k / (k + DEPTH)
    return Product(m, n, k, 2 * m * n * k / rate)


def transfers(alpha: float, beta: float, ranks: int) -> list[Transfer]:
    found = []
    for payload in (4096, 2**20, 2**24):
        share = (ranks - 1) / ranks * payload
        for name, times in (("all-gather", 1), ("all-reduce", 2)):
            steps = times * (ranks - 1)
            found.append(Transfer(name, steps, times * share, payload, steps * alpha + times * share * beta))
    return found


MEASURED = Measured(
    device="cpu",
    name="cpu",
    backend="gloo",
    ranks=4,
    threads=2,
    memory_bytes=8 * 10**9,
    products={dtype: [product(*size) for size in SIZES] for dtype in ("fp32", "bf16")},
    copy_bandwidth=1e10,
    blocks={"fp32": 0.25, "bf16": 0.25},
    attention_seconds=(1e-3, 4e-3),
    attention_flops=2.0 * 4 * 512 * 512 * 64,
    transfers=transfers(2e-4, 1e-9, 4),
)


def test_products() -> None:
    found = fit_products(MEASURED.products["fp32"])
    assert found.off < 1.15, "the grid of constants is coarse"
    # tolerance: the grid of constants is coarse
    assert found.peak == pytest.approx(PEAK, rel=0.15)


@pytest.mark.parametrize("ranks", [2, 8])
def test_link(ranks: int) -> None:
    """Exactly, from a gather and a reduction of several sizes; where latency cannot be told, it is never negative."""
    found = fit_link(transfers(3e-4, 2e-9, ranks))
    assert found.alpha == pytest.approx(3e-4) and found.beta == pytest.approx(2e-9)
    noisy = fit_link([Transfer("all-gather", 1, 1e3, 2000, 1e-6), Transfer("all-gather", 1, 1e6, 2000000, 2e-3)])
    assert noisy.alpha > 0 and noisy.beta > 0
    assert Link(1.0, 0.5).bandwidth == 2.0


def test_the_planner_reads_what_the_doctor_wrote(tmp_path: Path) -> None:
    """And predicts with it what was measured: products, attention, gathers and reductions."""
    path = tmp_path / "here.yaml"
    path.write_text(to_yaml(hardware(MEASURED, fitted(MEASURED), "2026-01-01")))
    device = find_device(str(path))
    assert device.memory_bytes == 8 * 10**9 and device.node.devices == 4 and device.kind == "cpu"
    for m, n, k in SIZES[1:3]:
        # tolerance: the grid of constants is coarse
        assert matmul_seconds(device, m, n, k, "fp32") == pytest.approx(product(m, n, k).seconds, rel=0.15)
    forward, backward = attention_seconds(device, 1, 512, 512, 4, 64, "fp32", "flash")
    # tolerance: the fit ends at a hundredth
    assert forward == pytest.approx(1e-3, rel=0.01) and backward == pytest.approx(4e-3, rel=0.01)
    group = group_of(4, 1, device.node.devices)
    # tolerance: the fit ends at a hundredth
    assert gather_seconds(device, group, 2**20) == pytest.approx(3 * 2e-4 + 0.75 * 2**20 * 1e-9, rel=0.01)
    ring, _ = all_reduce_times(device, group)
    # tolerance: the fit ends at a hundredth
    assert ring.seconds(2**20) == pytest.approx(2 * (3 * 2e-4 + 0.75 * 2**20 * 1e-9), rel=0.01)


def test_one_rank_has_no_link(tmp_path: Path) -> None:
    alone = Measured(**{**vars(MEASURED), "ranks": 1, "transfers": []})
    path = tmp_path / "one.yaml"
    path.write_text(to_yaml(hardware(alone, fitted(alone), "2026-01-01")))
    assert find_device(str(path)).node.devices == 1
    assert not any(finding.item.endswith("gloo") for finding in measured_findings(alone, fitted(alone)))


def test_verdicts(tmp_path: Path) -> None:
    """A line for each item, graded by its figures."""
    items = {finding.item: finding for finding in machine_findings(2, tmp_path)}
    assert set(items) == {"versions", "cores", "shared memory", "file system"}
    assert "torch" in items["versions"].text and not list(tmp_path.iterdir())
    assert cores_finding(4, 2, 1).grade == "warn" and cores_finding(2, 8, 1).grade == "ok"
    assert cores_finding(1, 8, 2).grade == "warn" and cores_finding(2, 8, 2).grade == "ok"
    assert shared_memory_finding(64 * 10**6).grade == "warn" and shared_memory_finding(10**9).grade == "ok"
    assert shared_memory_finding(None).grade == "warn"
    assert sync_finding(tmp_path / "missing").grade == "FAIL"
    lines = [str(finding) for finding in measured_findings(MEASURED, fitted(MEASURED))]
    assert any(line.startswith("ok    all-reduce over gloo: ") for line in lines)

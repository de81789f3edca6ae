"""The hardware catalogue and people's own hardware files. No known-fault rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.errors import ConfigError
from shardwright.planner.catalogue import CATALOGUE
from shardwright.planner.hardware import find_device


def test_every_figure_has_a_source() -> None:
    for device in CATALOGUE.values():
        for figure in ("memory_bytes", "memory_bandwidth", "peak_flops", "host_bandwidth"):
            assert device.sources[figure], (device.name, figure)
        assert device.node.source and device.efficiency.fitted
        if device.matmul_measured:
            assert "achievable" in device.sources["matmul_measured"]


@pytest.mark.parametrize(
    ("name", "bf16", "memory_gib", "link"),
    [
        ("h100-sxm-80gb", 989.4, 80, 450),
        ("a100-sxm-80gb", 312, 80, 300),
        ("l40s", 362, None, 31),
        ("b200", 2250, None, 900),
    ],
)
def test_datasheet_figures(name: str, bf16: float, memory_gib: int | None, link: float) -> None:
    device = find_device(name)
    assert device.peak("bf16") == pytest.approx(bf16 * 1e12)
    assert device.node.link_bandwidth == link * 1e9
    if memory_gib:
        assert device.memory_bytes == memory_gib * 2**30


def test_rate_stays_below_the_best_published_product() -> None:
    for device in CATALOGUE.values():
        if device.matmul_measured:
            assert device.peak("bf16") * device.efficiency.matmul <= device.matmul_measured


def test_fp16_stands_in_for_bf16_and_a_missing_rate_is_refused() -> None:
    assert find_device("v100").peak("bf16") == 125e12
    with pytest.raises(ConfigError, match="in fp8 is not known"):
        find_device("a100").peak("fp8")


def test_unknown_name_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean `h100-sxm-80gb`"):
        find_device("h100-sxm-8gb")


def test_hardware_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "like: h100-sxm-80gb\nmemory_bytes: 9.0e10\nnode: {devices: 4, network_bandwidth: 1.25e10}\n"
        "efficiency: {matmul: 0.6}\npeak_flops: {fp8: 1e15}\nsource: our tests\n"
    )
    device = find_device(str(path))
    assert (device.name, device.memory_bytes, device.node.devices) == ("mine", 90_000_000_000, 4)
    assert device.node.network_bandwidth == 12.5e9 and device.node.link_bandwidth == 450e9
    assert device.efficiency.matmul == 0.6 and device.peak("fp8") == 1e15 and device.peak("bf16") == 989.4e12
    assert device.sources["memory_bytes"] == device.node.source == device.efficiency.fitted == "our tests"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("like: h100\nmemory_byte: 1", "Did you mean `memory_bytes`"),
        ("like: h100\nnode: {device: 8}", "Did you mean `devices`"),
        ("like: h100\nefficiency: {matmull: 1}", "Did you mean `matmul`"),
        ("like: h100\nmemory_bytes: many", "not a number"),
        ("like: h100\nmemory_bytes: -1", "more than 0"),
        ("memory_bytes: 1e9", "does not give kind, memory_bandwidth, peak_flops, node"),
        ("like: h100\nkind: gpu", "Valid: cuda, cpu"),
        ("like: h100\nnode: 8", "node is a mapping"),
        ("- a", "a mapping"),
    ],
)
def test_hardware_file_is_strict(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        find_device(str(path))

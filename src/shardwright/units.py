"""Formatting of bytes, seconds, counts and FLOPs. GB is decimal, GiB is binary."""

from __future__ import annotations

KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12
KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40


def _scaled(value: float, steps: tuple[tuple[float, str], ...], digits: int) -> str:
    for size, unit in steps:
        if abs(value) >= size:
            return f"{value / size:.{digits}f} {unit}"
    size, unit = steps[-1]
    return f"{value / size:.0f} {unit}"


def format_bytes(size_bytes: float, digits: int = 1) -> str:
    """`17.5 GB`: decimal units, for files, traffic and rates, as makers of disks and links use them."""
    return _scaled(size_bytes, ((TB, "TB"), (GB, "GB"), (MB, "MB"), (KB, "kB"), (1, "B")), digits)


def format_bytes_binary(size_bytes: float, digits: int = 1) -> str:
    """`16.3 GiB`: binary units, for memory, as `plan`, `nvidia-smi` and torch print them."""
    return _scaled(size_bytes, ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"), (1, "B")), digits)


def format_count(value: float, digits: int = 1) -> str:
    """`35.7 M`, for parameters and tokens."""
    return _scaled(value, ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k"), (1, "")), digits).strip()


def counted(number: int, name: str) -> str:
    """`1 update`, `1,200 updates`."""
    return f"{number:,} {name}{'' if number == 1 else 's'}"


def format_flops(flops: float, digits: int = 1) -> str:
    """`989.0 TFLOP`; append `/s` for a rate."""
    steps = (
        (10**18, "EFLOP"),
        (10**15, "PFLOP"),
        (10**12, "TFLOP"),
        (10**9, "GFLOP"),
        (10**6, "MFLOP"),
        (1, "FLOP"),
    )
    return _scaled(flops, steps, digits)


def format_seconds(seconds: float) -> str:
    """`1.24 s`, `12 ms`, `3 min 05 s`, `4 h 02 min`, `272.2 days`."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{seconds / 86400:.1f} days"

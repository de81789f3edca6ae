"""`python -m tests.golden.losses` (make golden): runs the golden runs, prints what changed, and rewrites losses.json."""

from __future__ import annotations

import json

from tests.golden.runs import FILE, found_losses, kept, machine


def main() -> None:
    """A change of numerics needs its reason in docs/decisions."""
    before = kept()["losses"] if FILE.exists() else {}
    losses = found_losses()
    for name, values in losses.items():
        old = before.get(name)
        if old == values:
            print(f"{name:<16} as before")
        else:
            first = next((u for u, (a, b) in enumerate(zip(old or [], values)) if a != b), 0)
            was = f", was {old[first]!r}" if old else ""
            print(f"{name:<16} differs from update {first}: {values[first]!r}{was}")
    FILE.write_text(json.dumps({**machine(), "losses": losses}, indent=1) + "\n", encoding="utf-8")
    print(f"Wrote {FILE.name}.")


if __name__ == "__main__":
    main()

"""`python -m tests.golden.losses` (make golden): runs the golden runs, prints what changed, and rewrites losses.json."""

from __future__ import annotations

import json

from tests.golden.machine import machine
from tests.golden.runs import FILE, found_losses, found_sensitivity, kept


def main() -> None:
    """A change of numerics needs its reason in docs/decisions; it drops the bits of other machines."""
    before = kept() if FILE.exists() else {"machines": [], "fp64": {}}
    here, losses = machine(), {name: values for name, (values, _) in found_losses().items()}
    mine = next((one["losses"] for one in before["machines"] if one["machine"] == here), {})
    for name, values in losses.items():
        old = before["fp64"].get(name) if "fp64" in name else mine.get(name)
        if old == values:
            print(f"{name:<22} as before")
        elif old is None:
            print(f"{name:<22} new")
        else:
            first = next(u for u, (a, b) in enumerate(zip(old, values)) if a != b)
            print(f"{name:<22} differs from update {first}: {values[first]!r}, was {old[first]!r}")
    wide = {name: values for name, values in losses.items() if "fp64" in name}
    own = {"machine": here, "losses": {name: values for name, values in losses.items() if "fp32" in name}}
    others = [one for one in before["machines"] if one["machine"] != here] if before["fp64"] == wide else []
    written = {"machines": [*others, own], "fp64": wide, "sensitivity": found_sensitivity()}
    FILE.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    print(f"Wrote {FILE.name}: the bits of {len(others) + 1} machine{'s' if others else ''}.")


if __name__ == "__main__":
    main()

"""What ranks of a bench are told, and what they hand back, as JSON files."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from shardwright.config.load import Loaded

WARMUP, UPDATES = 3, 12


@dataclass(frozen=True)
class Spec:
    """layouts: name -> run, as `Loaded.to_json` writes it. peers: names of `bench.peers`.

    warmup, updates: of each loop, beyond those in which memory and traffic are measured. hardware: what predicts step times.
    trace: directory for the traces, or "". result: file that rank 0 writes.
    """

    layouts: dict[str, str]
    peers: tuple[str, ...]
    warmup: int
    updates: int
    hardware: str | None
    trace: str
    result: str

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Spec:
        values = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**values, "peers": tuple(values["peers"])})

    def loaded(self) -> dict[str, Loaded]:
        """The run of each layout."""
        return {name: Loaded.from_json(text) for name, text in self.layouts.items()}

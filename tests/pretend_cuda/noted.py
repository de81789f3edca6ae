"""Writes what `installed.notes` holds of each update of `shardwright train`, as JSON: for the budget of host waits."""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import os
import sys
from collections import Counter
from typing import Any

LOOP = "shardwright.train.loop"


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls `change` with the module of the training loop once it is imported."""

    def __init__(self, change: Any) -> None:
        self._change = change

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != LOOP:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            self._change(module.Trainer)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def watch(path: str) -> None:
    """Rank 0 writes {update: [[kind, what, stack, count], …]} to `path` when training ends."""
    from tests.pretend_cuda import installed

    def change(trainer: Any) -> None:
        train, update = trainer.train, trainer._update

        def noted_update(self: Any, *arguments: Any, **options: Any) -> Any:
            installed.notes.append(("update", str(self.at.update), ""))
            return update(self, *arguments, **options)

        def noted_train(self: Any, *arguments: Any, **options: Any) -> Any:
            with installed.logging():
                try:
                    return train(self, *arguments, **options)
                finally:
                    if int(os.environ.get("RANK", "0")) == 0:
                        _write(path, installed.notes)

        trainer.train, trainer._update = noted_train, noted_update

    sys.meta_path.insert(0, _AfterImport(change))


def _write(path: str, notes: list[tuple[str, str, str]]) -> None:
    found: dict[str, Counter[tuple[str, str, str]]] = {}
    at = "-1"
    for kind, what, stack in notes:
        if kind == "update":
            at = what
        else:
            found.setdefault(at, Counter())[kind, what, stack] += 1
    table = {at: [[*note, count] for note, count in counted.items()] for at, counted in found.items()}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(table, file, indent=1)

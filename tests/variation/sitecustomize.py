"""Read by every Python that tests/matrix.py starts, ranks too: SHARDWRIGHT_TEST_ONEDNN=off switches oneDNN off in torch.

Torch has no variable of its own for this. It is switched as soon as somebody imports torch, and not before: programs that
must run without torch stay without.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _TorchWithoutOnednn(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def then_switch_off(module: ModuleType) -> None:
            execute(module)
            module._C._set_mkldnn_enabled(False)

        spec.loader.exec_module = then_switch_off  # type: ignore[method-assign]
        return spec


if os.environ.get("SHARDWRIGHT_TEST_ONEDNN") == "off":
    sys.meta_path.insert(0, _TorchWithoutOnednn())

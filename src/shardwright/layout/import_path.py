"""Names of the run file that mean Python code: `package.module:function`."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from shardwright.errors import ConfigError, did_you_mean

_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def is_import_path(name: str) -> bool:
    """Whether `name` is `package.module:function`, and not a file or directory that is called so, such as `llama:8b`."""
    return bool(_IMPORT_PATH.fullmatch(name)) and not Path(name).exists()


def import_object(path: str, key: str) -> Any:
    """What `path`, the value of `key` in the run file, names. Raises `ConfigError` where there is no such module or name."""
    module, _, name = path.partition(":")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{key}: {module} cannot be imported: {error}.",
            "",
            "Install the package, or put its directory on PYTHONPATH.",
        ) from error
    if not hasattr(found, name):
        names = [name for name in vars(found) if not name.startswith("_")]
        raise ConfigError(f"{key}: {module} has no `{name}`.", "", did_you_mean(name, names))
    return getattr(found, name)

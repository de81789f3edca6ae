"""Names of the run file that mean Python code: `package.module:function`."""

from __future__ import annotations

import re
from pathlib import Path

_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def is_import_path(name: str) -> bool:
    """Whether `name` is `package.module:function`, and not a file or directory that is called so, such as `llama:8b`."""
    return bool(_IMPORT_PATH.fullmatch(name)) and not Path(name).exists()

"""Which names of the run file mean Python code."""

from __future__ import annotations

import re
from pathlib import Path

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def names_function(name: str) -> bool:
    """Whether `name` is `package.module:function`. A file or directory of that name is what it is: `llama:8b`."""
    return bool(_FUNCTION.fullmatch(name)) and not Path(name).exists()

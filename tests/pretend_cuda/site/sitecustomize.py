"""Installs the pretend device in every Python process that finds this directory on its path. See `tests/pretend_cuda`."""

import os
import sys
from pathlib import Path

if os.environ.get("PRETEND_CUDA"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from tests.pretend_cuda import installed

    installed.install()

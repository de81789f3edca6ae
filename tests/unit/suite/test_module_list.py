"""docs/modules.md is made from the docstrings of the modules."""

from __future__ import annotations

import subprocess
import sys

from tests.places import ROOT


def test_the_list_of_modules_is_up_to_date() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "docs" / "module_list.py"), "--check"])
    assert done.returncode == 0, "run `make docs`"

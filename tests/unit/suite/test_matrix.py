"""tests/matrix.py: variables reach what is started, oneDNN can be switched off, and its table holds what failed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.matrix import VARIATIONS, environment, run
from tests.started import LIMIT

CODE = "import sys; print('torch' in sys.modules); import torch; print(torch.backends.mkldnn.enabled, torch.get_num_threads())"


def test_onednn_is_off_in_a_program_that_imports_torch(tmp_path: Path) -> None:
    """And a program that does not, stays without torch."""
    both = environment("onednn_off") | VARIATIONS["4_threads"]
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=both, capture_output=True, text=True,
        timeout=LIMIT, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["False", "False", "4"]


def test_a_row_tells_what_failed_and_under_which_variables(tmp_path: Path) -> None:
    file = tmp_path / "test_three.py"
    file.write_text(
        "import os, pytest\n"
        "def test_passes(): assert os.environ['ATEN_CPU_CAPABILITY'] == 'avx2'\n"
        "def test_fails(): assert 'SHARDWRIGHT_TEST_ONEDNN' not in os.environ\n"
        "@pytest.mark.skip\n"
        "def test_is_skipped(): pass\n"
    )
    row = run(sys.executable, "onednn_off_avx2", [str(file)])
    assert (row.variation, row.passed, row.skipped, row.error) == ("onednn_off_avx2", 1, 1, "")
    assert len(row.failed) == 1 and row.failed[0].endswith("::test_fails")
    broken = run(sys.executable, "as_it_is", [str(file), "--no-such-option"])
    assert "no-such-option" in broken.error and broken.passed == 0

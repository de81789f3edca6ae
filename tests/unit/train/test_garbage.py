"""Python's garbage is collected after the updates that the run file names, and at no other time."""

from __future__ import annotations

import gc
from weakref import ref

from shardwright.train.garbage import collecting_every


class Cycle:
    def __init__(self) -> None:
        self.own = self


def test_cycles_live_until_the_update_of_a_collection() -> None:
    with collecting_every(2) as collect:
        assert not gc.isenabled()
        watched = ref(Cycle())
        collect(1)
        assert watched() is not None
        collect(2)
        assert watched() is None
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_null_leaves_python_alone() -> None:
    with collecting_every(None) as collect:
        collect(1)
        assert gc.isenabled() and gc.get_freeze_count() == 0

"""What tests share to run without `shardwright.backends.gloo`, on torch's own implementations."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from shardwright.backends.backend import CHOSEN
from shardwright.backends.facts import GLOO, has_own_backend


def _forget() -> None:
    has_own_backend.cache_clear()
    CHOSEN.clear()


@contextmanager
def without_gloo_package() -> Iterator[None]:
    """Within, the package cannot be imported: no backend, facts or attention of ours is found."""
    hidden = {name: None for name in (GLOO, *sys.modules) if name.startswith(GLOO)}
    with mock.patch.dict(sys.modules, hidden):
        _forget()
        yield
    _forget()

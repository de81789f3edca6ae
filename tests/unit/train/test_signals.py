"""The request to stop. Covers A102 on the side of one rank."""

from __future__ import annotations

import os
import signal

import pytest

from shardwright.mesh.cluster_environment import stop_signals
from shardwright.train.signals import StopFlag


@pytest.mark.parametrize("number", stop_signals())
def test_a_signal_only_sets_the_flag(number: signal.Signals) -> None:
    """A102: a rank that gets a signal does not leave the loop by itself."""
    before = signal.getsignal(number)
    with StopFlag() as stop:
        assert not stop.requested and stop.date is None
        os.kill(os.getpid(), number)
        assert stop.requested and stop.signal_name == number.name and stop.date is not None
    assert signal.getsignal(number) is before


def test_the_second_interrupt_ends() -> None:
    with StopFlag() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal_name == "SIGTERM"

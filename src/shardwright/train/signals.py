"""The request to stop: signals set a flag, and the loop asks for it between updates."""

from __future__ import annotations

import signal
from types import FrameType

from shardwright.measure import clock
from shardwright.mesh.cluster_environment import stop_signals


class StopFlag:
    """Set by SIGTERM, SIGUSR1, SIGHUP or SIGINT; the second SIGINT raises `KeyboardInterrupt`.

    A signal may reach one rank only, so a rank never acts on its own flag: the ranks agree by a reduction in the update
    and stop after the same one. Made in the main thread. `close` restores the handlers; it is a context manager too.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        """The first signal, and `date` when it came; None while there was none."""
        self.date: str | None = None
        self._interrupts = 0
        numbers = stop_signals()
        self._before = {number: signal.signal(number, self._receive) for number in numbers}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)  # the launcher holds them back until here

    @property
    def requested(self) -> bool:
        """Whether this rank was asked to stop."""
        return self.signal_name is not None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.signal_name is None:
            self.signal_name, self.date = signal.Signals(number).name, clock.date()
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            raise KeyboardInterrupt

    def close(self) -> None:
        """Puts back the handlers that were there before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __enter__(self) -> StopFlag:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

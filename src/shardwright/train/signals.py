"""Stop signals: a signal sets a flag, which the training loop reads between updates."""

from __future__ import annotations

import signal
from types import FrameType

from shardwright.measure import clock
from shardwright.mesh.cluster_environment import stop_signals


class StopFlag:
    """Set by SIGTERM, SIGUSR1, SIGHUP or SIGINT; the second SIGINT raises `KeyboardInterrupt`.

    A signal may reach one rank only, so a rank never acts on its own flag: the ranks reduce their flags in each update and stop
    after the same update. Made in the main thread. A context manager; `close` restores the handlers.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        """The first signal, None before; `date`: when it came."""
        self.date: str | None = None
        self._interrupts = 0
        numbers = stop_signals()
        self._before = {number: signal.signal(number, self._receive) for number in numbers}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)  # the launcher starts ranks with these signals blocked

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
        """Restores the handlers of before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __enter__(self) -> StopFlag:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

"""A note that a signal has come, for whoever looks later."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from types import FrameType

__all__ = ["SIGNALS", "SignalNote"]

SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU", "SIGINT")


class SignalNote:
    """Remembers the last of some signals that came, and does nothing else: a handler may run in the middle of anything.

    ``number`` is the signal, or 0 if none has come. What handled the signals when this was made gets them back in
    :meth:`pass_on`.

    Args:
        names: Of the signals; those that this system does not have are left out.

    >>> before, note = signal.getsignal(signal.SIGUSR2), SignalNote(["SIGUSR2"])
    >>> note.listen()
    True
    >>> signal.raise_signal(signal.SIGUSR2)
    >>> note.number == signal.SIGUSR2
    True
    >>> _ = signal.signal(signal.SIGUSR2, before)
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.number = 0
        self._before = {int(getattr(signal, name)): signal.getsignal(getattr(signal, name)) for name in _here(names)}

    def listen(self) -> bool:
        """Take the place of the handlers of these signals, whoever set them.

        Returns:
            Whether it was possible: Python sets handlers in the main thread only.
        """
        if threading.current_thread() is not threading.main_thread():
            return False
        for number in self._before:
            signal.signal(number, self._take)
        return True

    def pass_on(self) -> None:
        """Give a signal that has come, and that nobody has acted on, to what handled it before."""
        if self.number:
            signal.signal(self.number, self._before[self.number])
            signal.raise_signal(self.number)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.number = number


def _here(names: Sequence[str]) -> list[str]:
    return [name for name in names if hasattr(signal, name)]

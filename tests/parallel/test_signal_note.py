"""A signal is noted, and given to whom it was for."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from lightning_speedkit.parallel.signal_note import SIGNALS, SignalNote


@pytest.fixture
def came() -> Iterator[list[int]]:
    """The signals that the handler from before has got."""
    got: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    for number in before:
        signal.signal(number, lambda number, frame: got.append(number))
    yield got
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_last_one_is_noted_and_passed_on(came: list[int]) -> None:
    note = SignalNote(["SIGUSR1", "SIGUSR2"])
    note.pass_on()  # nothing has come
    assert note.listen()
    signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR2)
    assert (note.number, came) == (signal.SIGUSR2, [])
    note.pass_on()
    assert came == [signal.SIGUSR2]


def test_those_of_another_system_are_left_out(came: list[int]) -> None:
    assert SignalNote(["SIGNOWHERE", "SIGUSR1"]).listen()
    assert all(hasattr(signal, name) for name in SIGNALS if name in ("SIGTERM", "SIGINT"))


def test_a_thread_cannot(came: list[int]) -> None:
    heard: list[bool] = []
    thread = threading.Thread(target=lambda: heard.append(SignalNote(["SIGUSR1"]).listen()))
    thread.start()
    thread.join()
    assert heard == [False]

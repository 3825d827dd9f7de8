"""The progress of a pack on the standard error stream: how many samples, how fast, and how long it will still take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["PackProgress", "payload_bytes", "shown_progress"]

_REFRESH_SECONDS = 0.1
_PLAIN_BYTES = {int: 8, float: 8, bool: 1, type(None): 0}


class PackProgress(Protocol):
    """Told of every sample that was written."""

    def add(self, payload: int) -> None:
        """One more sample, of that many bytes."""


class _Bar:
    def __init__(self, bar: Progress, task: Any) -> None:
        self._bar = bar
        self._task = task
        self._samples = self._bytes = 0
        self._start = time.monotonic()
        self._next = self._start

    def add(self, payload: int) -> None:
        self._samples += 1
        self._bytes += payload
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _REFRESH_SECONDS
            self.show(now)

    def show(self, now: float) -> None:
        seconds = max(now - self._start, 1e-6)
        rate = f"{self._samples / seconds:,.0f} samples/s, {self._bytes / seconds / 1e6:,.1f} MB/s"
        self._bar.update(self._task, completed=self._samples, rate=rate)


@contextmanager
def shown_progress(title: str, total: int | None) -> Iterator[PackProgress]:
    """A bar while the block runs; with an unknown total it has no end and no time left."""
    count = TextColumn("{task.completed:,.0f}" + (f"/{total:,}" if total is not None else " samples"))
    columns = [TextColumn("{task.description}", markup=False), BarColumn(), count, TextColumn("{task.fields[rate]}")]
    if total is not None:
        columns += [TextColumn("left"), TimeRemainingColumn()]
    with Progress(*columns, console=Console(stderr=True)) as bar:
        shown = _Bar(bar, bar.add_task(title, total=total, rate=""))
        try:
            yield shown
        finally:
            shown.show(time.monotonic())


def payload_bytes(sample: Any) -> int:
    """The bytes of the values of a sample, as a store keeps them.

    >>> payload_bytes({"image": b"abc", "label": 7})
    11
    """
    if isinstance(sample, dict):
        return sum(map(payload_bytes, sample.values()))
    if isinstance(sample, tuple | list):
        return sum(map(payload_bytes, sample))
    if isinstance(sample, torch.Tensor):
        return sample.numel() * sample.element_size()
    if isinstance(sample, np.ndarray | np.generic):
        return int(sample.nbytes)
    if isinstance(sample, str):
        return len(sample.encode("utf-8", "surrogatepass"))
    return len(sample) if isinstance(sample, bytes) else _PLAIN_BYTES[type(sample)]

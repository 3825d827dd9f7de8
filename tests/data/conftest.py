"""For all tests of this folder: a fork server that has loaded the kit, and DataLoaders as no test has touched them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import pytest
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

multiprocessing.set_forkserver_preload(["lightning_speedkit.data"])  # else each process it starts loads torch

_iterators: WeakSet[Any] = WeakSet()


@pytest.fixture(autouse=True)
def _loaders_as_found(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Workers left to the collector take five seconds each: multiprocessing closes the descriptor that tells of their
    end before torch waits for it, and its number is that of another file by then."""
    begin = _MultiProcessingDataLoaderIter.__init__

    def begin_and_remember(self: Any, loader: Any) -> None:
        _iterators.add(self)
        begin(self, loader)

    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "__init__", begin_and_remember)
    yield
    for iterator in list(_iterators):
        if hasattr(iterator, "_workers_done_event"):  # else it failed to begin
            iterator._shutdown_workers()
    _iterators.clear()
    for kind in (DataLoader, BatchSampler):
        _undo_recording(kind)


def _undo_recording(kind: Any) -> None:
    """Lightning (2.6) lets loaders record what is set on them, and goes on with it after a hook that raised."""
    for name in ("__init__", "__setattr__", "__delattr__"):
        if f"__old{name}" in vars(kind):
            setattr(kind, name, vars(kind)[f"__old{name}"])
            delattr(kind, f"__old{name}")
    for other in kind.__subclasses__():
        _undo_recording(other)

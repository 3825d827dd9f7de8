"""Hears what the Trainer does through the announcements it makes to its profiler.

The Trainer announces every action by name: fetching a batch, running it, saving a checkpoint. No callback hook marks
the end of a fetch or of a save, so a clock built on hooks alone counts loggers, other callbacks and checkpoints as
waiting for data. The tap stands in for ``trainer.profiler`` while it is attached, passes everything on to it, and tells
its listeners of the few actions they asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.profilers import Profiler
from typing_extensions import override

__all__ = ["ProfilerTap"]

Listener = Mapping[str, tuple[Callable[[], None], Callable[[], None]]]


class ProfilerTap(Profiler):
    """The Trainer's profiler with listeners in front. Use :meth:`attach` and :meth:`detach`.

    >>> trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    >>> before = trainer.profiler
    >>> listener = {"save_checkpoint": (lambda: print("saving"), lambda: print("saved"))}
    >>> ProfilerTap.attach(trainer, listener)
    >>> with trainer.profiler.profile("save_checkpoint"):
    ...     pass
    saving
    saved
    >>> ProfilerTap.detach(trainer, listener)
    >>> trainer.profiler is before
    True
    """

    def __init__(self, profiler: Profiler) -> None:
        super().__init__()
        self._profiler = profiler
        self._listeners: list[Listener] = []

    @staticmethod
    def attach(trainer: Trainer, listener: Listener) -> None:
        """Call ``listener[action][0]`` when the action starts and ``listener[action][1]`` when it stops."""
        tap = _profiler_of(trainer)
        if not isinstance(tap, ProfilerTap):
            tap = ProfilerTap(tap)
            _set_profiler(trainer, tap)
        if not any(known is listener for known in tap._listeners):
            tap._listeners.append(listener)

    @staticmethod
    def detach(trainer: Trainer, listener: Listener) -> None:
        """Stop calling it. The Trainer gets its own profiler back when the last listener is gone."""
        tap = _profiler_of(trainer)
        if isinstance(tap, ProfilerTap):
            tap._listeners = [known for known in tap._listeners if known is not listener]
            if not tap._listeners:
                _set_profiler(trainer, tap._profiler)

    @override
    def start(self, action_name: str) -> None:
        self._profiler.start(action_name)
        for listener in self._listeners:
            if action_name in listener:
                listener[action_name][0]()

    @override
    def stop(self, action_name: str) -> None:
        for listener in self._listeners:
            if action_name in listener:
                listener[action_name][1]()
        self._profiler.stop(action_name)

    @override
    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # type: ignore[override]
        if any(action_name in listener for listener in self._listeners):
            return super().profile(action_name)
        return self._profiler.profile(action_name)

    @override
    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        self._profiler.setup(stage, local_rank, log_dir)

    @override
    def teardown(self, stage: str | None) -> None:
        pass  # also called when the tap is deleted: the profiler lives on with the Trainer, which tears it down

    @override
    def summary(self) -> str:
        return self._profiler.summary()

    @override
    def describe(self) -> None:
        self._profiler.describe()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_profiler":
            raise AttributeError(name)
        return getattr(self._profiler, name)


def _profiler_of(trainer: Trainer) -> Profiler:
    profiler: Profiler = trainer.profiler  # type: ignore[attr-defined]  # public, but set from outside the class
    return profiler


def _set_profiler(trainer: Trainer, profiler: Profiler) -> None:
    trainer.profiler = profiler  # type: ignore[attr-defined]

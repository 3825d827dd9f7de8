"""What Lightning calls and handles, against a real run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor

from lightning_speedkit.measure.lightning_hooks import (
    BATCH_HOOKS,
    batch_in_progress,
    call_hooks,
    leave_logged,
    pass_over_hooks,
)
from tests.optimize.line import Line, batches_of, loader, trainer


def _note(name: str) -> Any:
    def hook(self: Any, *_: Any) -> None:
        self.called.append(name)

    return hook


class _Notes(Callback):
    def __init__(self) -> None:
        self.called: list[str] = []

    on_train_batch_start = _note("on_train_batch_start")
    on_before_zero_grad = _note("on_before_zero_grad")
    on_before_backward = _note("on_before_backward")
    on_after_backward = _note("on_after_backward")
    on_before_optimizer_step = _note("on_before_optimizer_step")
    on_train_batch_end = _note("on_train_batch_end")


class _Passes(_Notes):
    """Needs the end of the first batch alone, and the start of the second."""

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        pass_over_hooks(trainer, self, _Passes, *BATCH_HOOKS)
        call_hooks(self, "on_train_batch_end")

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.called.append("on_train_batch_end")
        pass_over_hooks(trainer, self, _Passes, "on_train_batch_end")
        call_hooks(self, "on_train_batch_start", "on_train_batch_start")

    def on_train_end(self, *_: Any) -> None:
        call_hooks(self, *BATCH_HOOKS)


class _Child(_Passes):
    on_after_backward = _note("a hook of a subclass")


def test_these_are_the_hooks_of_a_batch_and_lightning_passes_over_them() -> None:
    notes, passes, child = _Notes(), _Passes(), _Child()
    trainer(notes, passes, child).fit(Line(), loader(batches_of(1, 1)))
    assert sorted(notes.called) == sorted(BATCH_HOOKS * 2)
    assert passes.called == ["on_train_batch_end", "on_train_batch_start"]
    assert [name for name in child.called if name not in passes.called] == ["a hook of a subclass"] * 2
    assert not set(BATCH_HOOKS) & set(vars(passes))


def test_a_callback_that_another_one_calls_keeps_its_hooks() -> None:
    class Calls(Callback):
        def __init__(self, inner: _Passes) -> None:
            self.inner = inner

        def on_train_start(self, *arguments: Any) -> None:
            self.inner.on_train_start(*arguments)

        def on_before_backward(self, *arguments: Any) -> None:
            self.inner.on_before_backward(*arguments)

    passes = _Passes()
    trainer(Calls(passes)).fit(Line(), loader(batches_of(1)))
    assert passes.called == ["on_before_backward"]


def test_the_batch_in_progress_is_the_one_that_was_given() -> None:
    class Asks(Callback):
        def __init__(self) -> None:
            self.told: list[tuple[float, int, bool]] = []

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            self.batch = batch

        def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
            batch, place = batch_in_progress(trainer)
            self.told.append((batch.item(), place, batch is self.batch))

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert batch_in_progress(trainer) == (batch, batch_idx)

    asks = Asks()
    trainer(asks, max_epochs=2).fit(Line(), loader(batches_of(1, 1, 1)))
    assert asks.told == [(1.0, 0, True), (2.0, 1, True), (3.0, 2, True)] * 2


class _Keeps(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.told: list[dict[str, float]] = []

    def log_metrics(self, metrics: Any, step: int) -> None:
        self.told.append({name: value for name, value in metrics.items() if name != "epoch"})


@pytest.mark.parametrize("leaves", [True, False])
def test_what_was_logged_is_kept_and_handled_no_more(leaves: bool) -> None:
    class Logs(Line):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            _, place = batch_in_progress(self.trainer)
            if place == 2 and leaves:
                leave_logged(self.trainer, "a", "gathered")
            if place in (1, 3):
                self.log("a", float(place), on_step=True, on_epoch=False)
                self.log("gathered", float(place), on_step=False, on_epoch=True)

        def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
            self.seen = [*getattr(self, "seen", []), float(self.trainer.callback_metrics.get("a", torch.nan))]
            entry = self.trainer.fit_loop.epoch_loop._results.get("on_before_optimizer_step.a")
            self.handled = [*getattr(self, "handled", []), entry is not None and not entry.has_reset]

    keeps, model = _Keeps(), Logs()
    trainer(logger=keeps, log_every_n_steps=2).fit(model, loader(batches_of(1, 1, 1, 1)))
    assert keeps.told == [{"a": 1.0}, {"a": 3.0}, {"gathered": 2.0}]
    assert model.seen[1:] == [1.0, 1.0, 3.0]
    assert model.handled == [False, True, not leaves, True]

"""A step left out leaves the optimizer, the schedules and the counter as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from lightning_speedkit.optimize.skipped_steps import SkippedSteps, drop_gradients, has_gradients, start_reading
from tests.optimize.line import Line, batches_of, loader, trainer


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
        lambda p: torch.optim.Adafactor(p, lr=0.1),
        lambda p: torch.optim.Muon(p, lr=0.1),
    ],
)
def test_a_dropped_step_equals_no_step(make: Any) -> None:
    gradients = torch.randn(3, 2, 2, generator=torch.Generator().manual_seed(1))

    def run(*places: int | None) -> nn.Parameter:
        weight = nn.Parameter(torch.ones(2, 2))
        optimizer = make([weight])
        for place in places:
            weight.grad = torch.full((2, 2), float("nan")) if place is None else gradients[place].clone()
            if place is None:
                drop_gradients(optimizer)
                assert not has_gradients(optimizer)
            optimizer.step()
        return weight

    assert torch.equal(run(None, 0, None, None, 1, 2, None), run(0, 1, 2))


class _Schedules(Line):
    def __init__(self) -> None:
        super().__init__(lr=1.0)
        self.rates: list[float] = []
        self.counted: list[int] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_batch_end(self, *_: Any) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        self.counted.append(self.trainer.global_step)


class _Skips(Callback):
    def __init__(self, places: set[int], owes: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self.places, self.owes, self.told = places, owes, []  # type: ignore[var-annotated]

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        steps = SkippedSteps.of(trainer)
        if trainer.fit_loop.epoch_loop.batch_idx in self.owes:
            steps.owe(trainer)
        if trainer.fit_loop.epoch_loop.batch_idx in self.places:
            drop_gradients(optimizer)
            steps.hold(trainer)
        steps.pay(trainer)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.told.append(SkippedSteps.of(trainer).settle(trainer))


def test_schedules_and_the_counter_wait() -> None:
    model, skips = _Schedules(), _Skips({1, 2})
    trainer(skips, _Skips({2})).fit(model, loader(batches_of(1, 1, 1, 1, 1)))  # two that skip one step count it once
    assert model.rates == [0.5, 0.5, 0.5, 0.25, 0.125]
    assert model.counted == [1, 1, 1, 2, 3]
    assert skips.told == [False, True, True, False, False]
    assert model.w.item() == 1.0 - 1 * 1.0 - 4 * 0.5 - 5 * 0.25


def test_what_is_owed_is_paid_by_the_next_step_that_is_taken() -> None:
    model = _Schedules()
    trainer(_Skips({1}, owes={1, 2})).fit(model, loader(batches_of(1, 1, 1, 1, 1)))
    assert model.rates == [0.5, 0.5, 0.5, 0.5, 0.25]
    assert model.counted == [1, 0, 0, 1, 2]


def test_nothing_is_paid_with_a_step_that_another_guard_skips() -> None:
    model = _Schedules()
    trainer(_Skips(set(), owes={1}), _Skips({1})).fit(model, loader(batches_of(1, 1, 1, 1)))
    assert model.rates == [0.5, 0.5, 0.5, 0.25]  # batch 0 was stepped for; 1 is skipped; 2 is what is owed
    assert model.counted == [1, 0, 1, 2]


def test_nothing_is_owed_after_it_is_forgotten() -> None:
    steps = SkippedSteps()
    steps.owed = 2
    steps.is_held = True
    steps.forget()
    assert (steps.owed, steps.is_held) == (0, False)


def test_max_steps_counts_steps_that_were_taken() -> None:
    model = _Schedules()
    trainer(_Skips({0, 1}), max_steps=2, max_epochs=-1).fit(model, loader(batches_of(1, 1, 1, 1, 1)))
    assert model.counted == [0, 0, 1, 2]


def test_schedules_that_do_not_follow_steps_are_left_alone() -> None:
    run = trainer()
    run.strategy._lightning_module = None
    steps = SkippedSteps.of(run)
    assert steps is SkippedSteps.of(run)
    schedule: Any = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([nn.Parameter(torch.ones(1))]))
    from lightning.pytorch.utilities.types import LRSchedulerConfig

    kinds = [("epoch", False), ("step", False), ("step", True)]
    run.strategy.lr_scheduler_configs = [
        LRSchedulerConfig(schedule, interval=interval, reduce_on_plateau=plateau) for interval, plateau in kinds
    ]
    steps.hold(run)
    steps.hold(run)
    assert [config.interval for config in run.lr_scheduler_configs] == ["epoch", "held", "step"]
    steps.release()
    assert [config.interval for config in run.lr_scheduler_configs] == ["epoch", "step", "step"]


def test_a_number_is_the_one_at_the_time_of_asking() -> None:
    value = torch.tensor(2.0)
    read = start_reading(value)
    value.fill_(3.0)
    assert read() == 2.0


@pytest.mark.gpu
def test_a_number_of_a_gpu_comes_without_a_synchronisation() -> None:
    value = torch.full((), 2.0, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        read = start_reading(value)
        value.fill_(3.0)
        assert read() == 2.0
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_needs_a_step_waits_while_it_is_in_doubt() -> None:
    steps, told = SkippedSteps(), []
    steps.once_known("a", lambda: told.append(1))
    assert told == [1]
    steps.doubt()
    for value in (2, 3):
        steps.once_known("a", lambda value=value: told.append(value))  # the newest one counts
    steps.once_known("b", lambda: told.append(4))
    assert told == [1]
    steps.know()
    steps.know()
    assert told == [1, 3, 4]
    steps.doubt()
    steps.once_known("a", lambda: told.append(5))
    steps.forget()
    steps.know()
    assert told == [1, 3, 4]

"""Each private attribute of Lightning that says where a window ends still is what the kit takes it for. A failure here
means: read the new Lightning, then change ``lightning_windows.py``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_speedkit.measure.lightning_internals import loss_divisor
from lightning_speedkit.measure.lightning_windows import follow_windows, weigh_losses


class _Rules:
    """Windows of the batches 0, 1 | 2 | 3, 4, 5, whatever ``accumulate_grad_batches`` says."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.counts_steps = True
        self.settled, self.accumulates = -1, False
        self.held = True
        self.told: list[tuple[int, float]] = []
        self.opened: list[int] = []

    def start(self, batch: int, data: Any) -> None:
        self.told.append((batch, data.item()))

    def open(self) -> None:
        self.opened.append(self.trainer.fit_loop.batch_idx)

    def hold(self) -> bool:
        return self.held

    def opens(self) -> bool:
        return self.trainer.fit_loop.batch_idx in (0, 2, 3)

    def closes(self, batch: int) -> bool | None:
        return batch in (1, 2, 5) if self.held else None

    def is_open(self) -> bool:
        return self.trainer.fit_loop.batch_idx in (0, 3, 4)

    def steps_in(self, batches: int, epochs: int) -> int:
        return batches * 100 + epochs


class _InWindows(Callback):
    """Follows the windows, and keeps what happens in them."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.stop_after = stop_after
        self.cleared: list[int] = []
        self.stepped: list[int] = []
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.estimated: Any = None
        self.undo: Any = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.rules = _Rules(trainer)
        self.undo = follow_windows(trainer, self.rules)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.estimated = trainer.estimated_stepping_batches

    def on_before_zero_grad(self, trainer: Any, *rest: Any) -> None:
        self.cleared.append(trainer.fit_loop.batch_idx)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.stepped.append(trainer.fit_loop.batch_idx)
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())
        if batch_idx == self.stop_after:
            trainer.should_stop = True


class _Scheduled(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.w * batch).mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step else 1e-30)
        return [optimizer], [{"scheduler": rate, "interval": "step", "frequency": 2}]


def _in_windows(watch: _InWindows, batches: int = 6, module: LightningModule | None = None, **options: Any) -> Trainer:
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = Trainer(accelerator="cpu", callbacks=[watch], accumulate_grad_batches=4, **{**quiet, **options})
    data = torch.arange(1.0, 1.0 + batches).reshape(-1, 1)
    trainer.fit(module or _Scheduled(), DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    return trainer


def test_lightning_follows_other_windows_than_its_own() -> None:
    watch = _InWindows()
    trainer = _in_windows(watch, max_epochs=2)
    assert watch.rules.told == [(batch, batch + 1.0) for batch in range(6)] * 2
    assert watch.rules.opened == watch.cleared == [0, 2, 3] * 2
    assert watch.stepped == [1, 2, 5] * 2
    assert watch.losses == [1, 2, 3, 4, 5, 6] * 2  # not divided by 4
    assert watch.rates == [1e-30, 1e-30, 0.0, 0.0, 0.0, 0.0]  # the frequency of 2 counts steps, over epochs
    assert (trainer.global_step, watch.estimated) == (6, 602)
    assert trainer.accumulate_grad_batches == 4


@pytest.mark.parametrize(("stop_after", "batches_done"), [(0, 2), (1, 2), (3, 6)])
def test_a_stop_waits_for_the_end_of_a_window(stop_after: int, batches_done: int) -> None:
    watch = _InWindows(stop_after)
    _in_windows(watch, max_epochs=2)
    assert len(watch.losses) == batches_done


def test_the_end_of_an_epoch_steps_and_limits_the_estimate() -> None:
    watch = _InWindows()
    trainer = _in_windows(watch, batches=5, max_epochs=1, max_steps=400)
    assert watch.stepped == [1, 2, 4]
    assert watch.estimated == 400
    endless = _InWindows()
    _in_windows(endless, max_epochs=-1, max_steps=3)
    assert endless.estimated == 3
    assert trainer.global_step == 3


def test_rules_that_do_not_hold_leave_lightning_to_itself() -> None:
    class Off(_InWindows):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            super().setup(trainer, pl_module, stage)
            self.rules.held = False

    watch = Off(stop_after=4)
    _in_windows(watch, max_epochs=2)
    assert (watch.cleared, watch.stepped) == ([0, 4], [3])
    assert (watch.rules.told, watch.rules.opened) == ([], [])
    assert watch.losses == [0.25, 0.5, 0.75, 1.0, 1.25]
    assert watch.estimated == 4


def test_lightning_stops_following() -> None:
    watch = _InWindows()
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=1)
    followed = [trainer, trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.automatic_optimization]
    found = [type(thing) for thing in followed]
    watch.setup(trainer, None, "fit")
    assert [type(thing).__name__ for thing in followed] == [kind.__name__ for kind in found]
    assert all(isinstance(thing, kind) and type(thing) is not kind for thing, kind in zip(followed, found, strict=True))
    watch.undo()
    watch.undo()
    assert [type(thing) for thing in followed] == found


def test_a_lightning_without_what_windows_override_is_told() -> None:
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit_loop.epoch_loop = nn.Identity()  # type: ignore[assignment]
    trainer.fit_loop.epoch_loop.automatic_optimization = object()  # type: ignore[assignment]
    with pytest.raises(AttributeError, match=r"no Identity\.done"):
        follow_windows(trainer, _Rules(trainer))


@pytest.mark.parametrize("weight", [10.0, torch.tensor(10.0)])
@pytest.mark.parametrize("kind", [lambda loss: loss, lambda loss: {"loss": loss, "more": 7}])
def test_a_loss_is_weighted_after_every_hook_has_seen_it(kind: Any, weight: Any) -> None:
    class Outputs(_Scheduled):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return kind(super().training_step(batch, batch_idx))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    class Weighs(_InWindows):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            super().setup(trainer, pl_module, stage)
            self.plugin = trainer.precision_plugin
            self.undo_weights = weigh_losses(trainer, lambda: weight)
            self.seen: list[float] = []
            self.gradients: list[float] = []

        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
            self.seen.append(loss.item())

        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            self.gradients.append(pl_module.w.grad.item())

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
            assert outputs.get("more", 7) == 7
            pl_module.w.data.fill_(1.0)

    watch = Weighs()
    _in_windows(watch, module=Outputs(), max_epochs=1)
    assert watch.seen == watch.losses == [1, 2, 3, 4, 5, 6]
    assert watch.gradients == [10, 30, 30, 40, 90, 150]  # windows of the batches 1, 2 | 3 | 4, 5, 6
    assert "backward" in vars(watch.plugin)
    watch.undo_weights()
    watch.undo_weights()
    assert "backward" not in vars(watch.plugin)


def test_a_backward_that_another_one_has_put_there_is_called_and_left() -> None:
    trainer, calls = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False), []
    plugin: Any = trainer.precision_plugin
    plugin.backward = theirs = lambda *arguments, **options: calls.append((arguments, options))
    trainer.strategy.connect(_Scheduled())
    undo = weigh_losses(trainer, lambda: 0.5)
    plugin.backward(torch.tensor(3.0), "module")
    assert calls == [((torch.tensor(1.5), "module"), {})]
    undo()
    assert plugin.backward is theirs


@pytest.mark.parametrize("wrong", [{"no loss": 1}, 3])
def test_what_is_no_loss_gets_lightnings_message(wrong: Any) -> None:
    class Outputs(_Scheduled):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return wrong

    with pytest.raises(MisconfigurationException, match=r"'loss' key needs to be present|must return a Tensor"):
        _in_windows(_InWindows(), module=Outputs(), max_epochs=1)


def test_what_a_loss_was_divided_by() -> None:
    class Asks(_InWindows):
        def __init__(self, follows: bool) -> None:
            super().__init__()
            self.follows, self.told = follows, []  # type: ignore[var-annotated]

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            if self.follows:
                super().setup(trainer, pl_module, stage)

        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
            self.told.append(loss_divisor(trainer))

    for follows, factor in ((False, 4), (True, 1)):
        asks = Asks(follows)
        _in_windows(asks, max_epochs=1)
        assert asks.told == [factor] * 6


def test_a_batch_that_is_settled_is_not_told_of() -> None:
    class Knows(_InWindows):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx in (0, 4):
                self.rules.settled, self.rules.accumulates = batch_idx + 1, True

    watch = Knows()
    _in_windows(watch, max_epochs=1)
    assert [batch for batch, _ in watch.rules.told] == [1, 2, 3, 5]


class _Settles(_InWindows):
    """Turns the answer round for the first batch, and keeps what Lightning then thinks."""

    def __init__(self, held: bool) -> None:
        super().__init__()
        self.held = held
        self.answers: list[tuple[bool, bool]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        loop, rules = trainer.fit_loop.epoch_loop, self.rules
        rules.held, rules.settled = self.held, -1
        own = loop._should_accumulate()
        rules.settled, rules.accumulates = 1, not own
        self.answers.append((own, loop._should_accumulate()))
        rules.held, rules.settled = True, -1


@pytest.mark.parametrize("held", [True, False])
def test_a_settled_answer_holds_for_its_batch_while_the_rules_do(held: bool) -> None:
    watch = _Settles(held)
    _in_windows(watch, max_epochs=1)
    assert [answer != own for own, answer in watch.answers] == [held, False, False, False, False, False]

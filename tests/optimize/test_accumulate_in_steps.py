"""Windows that are not those of one factor: factors by optimizer step, targets in samples and labels, stops; and what
Lightning then says of them: the number of steps, the learning rates and the losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_speedkit.optimize import AccumulationScheduler
from tests.optimize.line import Line, Stream, batches_of, loader, steps, trainer

ONE_TO_SIX = batches_of(1, 1, 1, 1, 1, 1)


def _ones(batches: int) -> list[Tensor]:
    return batches_of(*[1] * batches)


@pytest.mark.parametrize(
    ("schedule", "batches", "expected"),
    [
        # the factor changes right after the step that its start names
        ({0: 2, 2: 3}, 12, [1.5, 3.5, 6, 9, 11.5]),  # 12 | 34 | 567 | 8 9 10 | 11 12
        ({0: 1, 2: 2, 4: 4}, 14, [1, 2, 3.5, 5.5, 8.5, 12.5]),  # 1 | 2 | 34 | 56 | 7..10 | 11..14
        ({0: 4, 1: 1}, 7, [2.5, 5, 6, 7]),
        ({1: 3}, 5, [1, 3, 5]),
        ({0: 3, 1: 2, 2: 5, 3: 1}, 11, [2, 4.5, 8, 11]),
        ({0: 2, 9: 1}, 4, [1.5, 3.5]),
    ],
)
@pytest.mark.parametrize("sized", [True, False])
def test_the_factor_changes_at_a_step(
    schedule: dict[int, int], batches: int, expected: list[float], sized: bool
) -> None:
    data: Any = _ones(batches) if sized else DataLoader(Stream(_ones(batches)), batch_size=None)
    found = steps(data, AccumulationScheduler(schedule, unit="step"))
    assert found == pytest.approx(expected, rel=1e-14)


def test_steps_are_counted_over_epochs_and_no_batch_is_used_twice() -> None:
    # 1 | 2 | 345 | 6, then 123 | 456; in units of the sum of all samples
    found = steps(ONE_TO_SIX, AccumulationScheduler({0: 1, 2: 3}, unit="step"), max_epochs=2)
    assert found == pytest.approx([1, 2, 4, 6, 2, 5], rel=1e-14)


def test_unequal_micro_batches_and_clipping_with_factors_by_step() -> None:
    data = batches_of(1, 3, 2, 4, 1, 2)  # 1 | 2..6 | 7..13
    ours = AccumulationScheduler({0: 1, 1: 2, 2: 3}, unit="step")
    found = steps(data, ours, gradient_clip_val=8.0)
    assert found == pytest.approx([1, 4, 8], rel=1e-5)


def test_max_steps_ends_a_run_of_changing_factors() -> None:
    ours = AccumulationScheduler({0: 1, 1: 4}, unit="step")
    assert steps(_ones(12), ours, max_steps=2, max_epochs=-1) == [1, 3.5]


def test_float16_with_factors_by_step() -> None:
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
    data = batches_of(*[1] * 6, dtype=torch.float32)
    ours = AccumulationScheduler({0: 1, 1: 2, 2: 3}, unit="step")
    found = steps(data, ours, model=Line(dtype=torch.float32), plugins=[plugin])
    assert found == pytest.approx([1, 2.5, 5], rel=1e-3)


@pytest.mark.parametrize(
    ("target", "unit", "sizes", "expected"),
    [
        (4, "epoch", [1, 3, 2, 4, 1, 2], [2.5, 7.5, 12.0]),  # 1..4 | 5..10 | 11..13, the short rest
        (5, "epoch", [2] * 6, [3.5, 9.5]),  # three of 2 reach 5
        ({0: 1, 2: 4}, "step", [1] * 6, [1, 2, 4.5]),
        ({0: 2, 1: 3}, "epoch", [1] * 3, [1.5, 3, 2]),
        (1, "epoch", [2, 3], [1.5, 4]),
        (100, "epoch", [1, 3], [2.5]),
    ],
)
def test_a_window_ends_when_the_target_is_reached(
    target: Any, unit: str, sizes: list[int], expected: list[float]
) -> None:
    epochs = 2 if isinstance(target, dict) and unit == "epoch" else 1
    found = steps(batches_of(*sizes), AccumulationScheduler(target_batch=target, unit=unit), max_epochs=epochs)
    assert found == pytest.approx(expected, rel=1e-14)


class _Labelled(Line):
    """The mean over the labels that count; the gradient is the mean of their ``x``."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, labels = batch["x"], batch["labels"]
        loss = (self.w * x).where(labels != -100, 0.0).sum() / (labels != -100).sum().clamp(min=1)
        self.losses.append(loss.detach().clone())
        return loss


def _labelled(*counts: int) -> list[Any]:
    """Rows of 4 places, so many of which count; these hold 1, 2, 3, ... and the others 1000."""
    batches, number = [], 1
    for count in counts:
        x, labels = torch.full((1, 4), 1000.0, dtype=torch.float64), torch.full((1, 4), -100)
        for place in range(count):
            x[0, place], labels[0, place] = number, 1
            number += 1
        batches.append({"x": x, "labels": labels})
    return batches


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"schedule": 4, "count": "labels"}, [5.5, 12.0]),  # 1..10 | 11..13
        ({"target_batch": 6, "count": "labels"}, [3.5, 10.0]),  # 1..6 | 7..13
        ({"schedule": 4, "count": f"{__name__}:count_ones"}, [5.5, 12.0]),
    ],
)
def test_each_label_weighs_the_same(arguments: dict[str, Any], expected: list[float]) -> None:
    found = steps(_labelled(1, 3, 2, 4, 1, 2), AccumulationScheduler(**arguments), model=_Labelled())
    assert found == pytest.approx(expected, rel=1e-14)


def count_ones(batch: Any) -> Tensor:
    return (batch["labels"] == 1).sum()


def test_windows_without_a_label_that_counts_give_no_gradient_and_no_nan() -> None:
    # cross entropy over ignored labels only is NaN, and so is the loss that is seen; its gradient is 0
    class Classes(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return nn.functional.cross_entropy((self.w * batch["x"]).reshape(1, 4), batch["labels"])

    def batch(label: int, x: float) -> dict[str, Tensor]:
        return {"x": torch.tensor([x, 0.0, 0.0, 0.0], dtype=torch.float64), "labels": torch.tensor([label])}

    data = [batch(-100, 3.0), batch(-100, 2.0), batch(-100, 1.0), batch(0, 1.0)]
    model = Classes(lr=0.0)
    found = steps(data, AccumulationScheduler(2, count="labels"), model=model)
    likelihood = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64).softmax(0)[0].item()
    assert found == pytest.approx([0.0, likelihood - 1.0], rel=1e-12)


class _Stop(Callback):
    """Asks to stop in the hook of a batch, or while it validates."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.after:
            trainer.should_stop = True


@pytest.mark.parametrize(("after", "expected"), [(0, [1.5]), (1, [1.5]), (2, [1.5, 3.5]), (4, [1.5, 3.5, 5.5])])
def test_a_stop_inside_a_window_waits_for_its_end(
    after: int, expected: list[float], recwarn: pytest.WarningsRecorder
) -> None:
    run, model = trainer(AccumulationScheduler(2), _Stop(after), max_epochs=3), Line()
    run.fit(model, loader(ONE_TO_SIX))
    assert model.optimizer.seen == expected
    assert run.should_stop
    assert not [w for w in recwarn if "accumulation window" in str(w.message)]


def test_a_stop_asked_for_by_a_validation_inside_a_window_leads_to_no_other_one() -> None:
    class Diverged(Line):
        validated = 0

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            Diverged.validated += 1
            self.log("val", torch.tensor(9.0))

    stop, model = EarlyStopping("val", divergence_threshold=1.0), Diverged()
    run = trainer(AccumulationScheduler(4), stop, val_check_interval=2, num_sanity_val_steps=0, max_epochs=5)
    run.fit(model, loader(ONE_TO_SIX), loader(batches_of(1)))
    # asked for after batch 2; batch 3 only ends with the window's second validation, after batch 4
    assert (model.optimizer.seen, Diverged.validated, stop.stopped_epoch) == ([2.5], 2, 0)


@pytest.mark.parametrize("frequency", [1, 2, 3])
@pytest.mark.parametrize("arguments", [{"schedule": 4}, {"target_batch": 4}], ids=str)
def test_learning_rates_change_by_optimizer_steps(arguments: dict[str, Any], frequency: int) -> None:
    class Halving(Line):
        def __init__(self) -> None:
            super().__init__(lr=1.0)
            self.rates: list[float] = []

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
            return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": frequency}]

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.rates.append(optimizer.param_groups[0]["lr"])

    model = Halving()
    steps(_ones(20), AccumulationScheduler(**arguments), model=model, max_epochs=2)  # 5 steps an epoch
    assert model.rates == [0.5 ** (step // frequency) for step in range(10)]


class _Losses(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []
        self.logged: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(outputs["loss"].item())
        if "window" in trainer.callback_metrics and trainer.global_step > len(self.logged):
            self.logged.append(trainer.callback_metrics["window"].item())


@pytest.mark.parametrize("precision", ["double", "16-mixed"])
def test_the_loss_is_the_mean_and_not_a_part_of_it(precision: str) -> None:
    # samples 1..10 in the first window of four, 11..13 in the second
    options: dict[str, Any] = {}
    if precision == "16-mixed":
        options["plugins"] = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))]
    dtype = torch.float64 if precision == "double" else torch.float32
    losses = _Losses()
    ours = AccumulationScheduler(4, log_loss="window")
    steps(batches_of(1, 3, 2, 4, 1, 2, dtype=dtype), ours, losses, model=Line(lr=0.0, dtype=dtype), **options)
    assert losses.seen == pytest.approx([1, 3, 5.5, 8.5, 11, 12.5], rel=1e-6)
    assert losses.logged == pytest.approx([5.5, 12.0], rel=1e-6)


def test_the_mean_loss_passes_over_micro_batches_without_labels() -> None:
    losses, data = _Losses(), _labelled(1, 0, 2)
    steps(data, AccumulationScheduler(3, count="labels", log_loss="window"), losses, model=_Labelled(lr=0.0))
    assert losses.logged == [2.0]


def test_an_epoch_shorter_than_a_window_is_told_once() -> None:
    with pytest.warns(UserWarning, match="The accumulation factor is 8 and an epoch has 2 batches") as told:
        assert steps(_ones(2), AccumulationScheduler(8), max_epochs=4) == [1.5] * 4
    assert sum("an epoch has 2 batches" in str(w.message) for w in told) == 1


@pytest.mark.parametrize(
    ("target", "sizes", "told"),
    [(100, [1, 3], ["100 and an epoch counts 4 over"]), (4, [1, 3], []), (3, [2, 1, 2], [])],
)
@pytest.mark.parametrize("sized", [True, False])
def test_a_target_that_no_epoch_reaches_is_told_once(
    target: int, sizes: list[int], told: list[str], sized: bool, recwarn: pytest.WarningsRecorder
) -> None:
    data: Any = batches_of(*sizes) if sized else DataLoader(Stream(batches_of(*sizes)), batch_size=None)
    steps(data, AccumulationScheduler(target_batch=target), max_epochs=3)
    found = [str(w.message) for w in recwarn if "target_batch is" in str(w.message)]
    assert len(found) == len(told)
    assert all(words in message for words, message in zip(told, found, strict=True))


def test_a_batch_that_is_none_has_no_loss_to_log() -> None:
    class Logged(_Losses):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *rest: Any) -> None:
            super().on_train_batch_end(trainer, pl_module, outputs or {"loss": torch.tensor(0.0)}, *rest)

    losses, batches = Logged(), [ONE_TO_SIX[0], None, *ONE_TO_SIX[2:]]
    data = DataLoader(Stream(batches), batch_size=None)
    steps(data, AccumulationScheduler(3, log_loss="window"), losses, model=Line(lr=0.0))
    assert losses.logged == [2.0, 5.0]


def test_lightning_is_left_as_it_was(tmp_path: Path) -> None:
    run = trainer(AccumulationScheduler({0: 1, 1: 4}, unit="step"), default_root_dir=tmp_path)
    kinds = [type(thing) for thing in (run, run.fit_loop.epoch_loop, run.fit_loop.epoch_loop.automatic_optimization)]
    inside: list[bool] = []

    class Look(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            inside.append(isinstance(trainer, Trainer) and type(trainer).__name__ == "Trainer")

    run.callbacks.append(Look())  # type: ignore[attr-defined]
    run.fit(Line(), loader(ONE_TO_SIX))
    left = [type(thing) for thing in (run, run.fit_loop.epoch_loop, run.fit_loop.epoch_loop.automatic_optimization)]
    assert inside == [True]
    assert left == kinds
    assert run.estimated_stepping_batches == 6

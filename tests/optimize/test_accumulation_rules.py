"""The number of steps that is planned, and windows that others put aside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import LearningRateFinder
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_speedkit.optimize import AccumulationScheduler
from tests.optimize.line import Line, Stream, batches_of, steps, trainer


def _ones(batches: int) -> list[Tensor]:
    return batches_of(*[1] * batches)


class _Plan(Line):
    def configure_optimizers(self) -> Any:
        self.planned = self.trainer.estimated_stepping_batches
        optimizer = super().configure_optimizers()
        rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=int(self.planned))
        return [optimizer], [{"scheduler": rate, "interval": "step"}]


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ({"schedule": {0: 1, 1: 4}}, {}),
        ({"schedule": {0: 1, 2: 2, 5: 4}, "unit": "step"}, {}),
        ({"schedule": {0: 1, 2: 2, 5: 4}, "unit": "step"}, {"max_steps": 7}),
        ({"schedule": 4}, {"limit_train_batches": 7}),
        ({"target_batch": 4}, {}),
    ],
)
def test_the_planned_steps_are_those_that_are_taken(arguments: dict[str, Any], options: dict[str, Any]) -> None:
    # one step more would raise in OneCycleLR
    model = _Plan()
    data = DataLoader(torch.arange(1.0, 11.0, dtype=torch.float64), batch_size=1)  # type: ignore[arg-type]
    assert len(steps(data, AccumulationScheduler(**arguments), model=model, max_epochs=3, **options)) == model.planned


@pytest.mark.parametrize(
    ("options", "expected"), [({"max_epochs": -1, "max_steps": 3}, 3), ({"max_epochs": 2, "max_steps": 2}, 2)]
)
def test_without_a_length_the_planned_steps_are_lightnings(options: dict[str, Any], expected: int) -> None:
    model = _Plan()
    data = DataLoader(Stream(_ones(8)), batch_size=None)
    assert len(steps(data, AccumulationScheduler({0: 2, 1: 4}), model=model, **options)) == model.planned == expected


class _CountsTwice(AccumulationScheduler):
    def count_samples(self, batch: Any) -> int:
        return 2 * len(batch)


def test_the_number_of_steps_is_not_guessed_from_another_count_of_samples() -> None:
    data = DataLoader(torch.arange(1.0, 11.0, dtype=torch.float64), batch_size=1)  # type: ignore[arg-type]
    with pytest.raises(MisconfigurationException, match="which are not known before"):
        steps(data, _CountsTwice(target_batch=4), model=_Plan())


def test_the_number_of_steps_towards_a_target_is_not_guessed() -> None:
    class Plan(Line):
        def configure_optimizers(self) -> Any:
            self.planned = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    ours = AccumulationScheduler(target_batch=4)
    with pytest.raises(MisconfigurationException, match=r"target_batch=.*Set Trainer\(max_steps=...\)"):
        steps([torch.ones(2)], ours, model=Plan())
    model = Plan()
    steps([torch.ones(2)] * 4, ours, model=model, max_steps=2)
    assert model.planned == 2


def test_a_learning_rate_finder_sees_lightnings_accumulation(tmp_path: Any) -> None:
    # It puts all callbacks aside while it looks: each step takes the mean over 4 batches, and not that of the last one.
    class Steep(Line):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return (self.w * batch).square().mean()

    finder = LearningRateFinder(num_training_steps=3, early_stop_threshold=None)
    run, model = trainer(AccumulationScheduler(4), finder, default_root_dir=tmp_path), Steep()
    data = DataLoader(torch.arange(1.0, 25.0, dtype=torch.float64), batch_size=1)  # type: ignore[arg-type]
    run.fit(model, data)
    looked, trained = model.optimizer.seen[:3], model.optimizer.seen[-6:]
    assert looked[0] == pytest.approx(2 * (1 + 4 + 9 + 16) / 4, rel=1e-12)
    assert trained[0] == looked[0]
    assert run.global_step == 6

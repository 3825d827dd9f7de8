"""One trial: it makes the steps that Lightning's own loops make, and its figures are of those steps."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_speedkit.memory.batch_size import BatchSizeSearch
from lightning_speedkit.memory.batch_size_find import BatchSizeTrial
from lightning_speedkit.memory.batch_size_ranks import Ranks
from lightning_speedkit.memory.batch_size_trial import Trial
from tests.memory.scarce import Data, Net, dataset, fit, new_trainer

HOOKS = [
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_after_batch_transfer",
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_model_eval",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
]


class _Told(Net):
    """Writes down each hook with the number of the batch, and what it is given there."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.told: list[str] = []


def _hook(name: str) -> Any:
    def hook(self: Any, *arguments: Any, **options: Any) -> Any:
        result = getattr(super(_Told, self), name)(*arguments, **options)
        shapes = [str(tuple(one[0].shape)) for one in arguments if isinstance(one, (list, tuple)) and len(one) == 2]
        self.told.append(" ".join([name, *shapes, *[str(one) for one in arguments if isinstance(one, int)]]))
        return result

    return hook


for _name in HOOKS:
    setattr(_Told, _name, _hook(_name))


class _OneTrial(Callback):
    """A trial in place of the whole search; keeps what it did before the run begins."""

    def __init__(self, steps: int, at_hand: int | None = None) -> None:
        self.steps, self.at_hand = steps, at_hand
        self.result: BatchSizeTrial | None = None
        self.state: dict[str, Tensor] = {}
        self.told: list[str] = []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log = pl_module.log_dict = lambda *_, **__: None
        size = trainer.datamodule.hparams["batch_size"]
        self.result = Trial(trainer, Ranks(1), self.steps).run(size, size, self.at_hand)
        self.state = {name: value.clone() for name, value in pl_module.state_dict().items()}
        self.told = list(getattr(pl_module, "told", []))
        trainer.should_stop = True
        del pl_module.log, pl_module.log_dict


def test_a_trial_makes_the_steps_of_lightning_s_loops() -> None:
    plain, tried, trial = _Told(), _Told(), _OneTrial(3)
    new_trainer(max_epochs=1, limit_train_batches=3, limit_val_batches=2).fit(plain, Data(5))
    new_trainer(trial, max_epochs=1, max_steps=0).fit(tried, Data(5))
    assert trial.told == plain.told
    assert {one.split()[0] for one in trial.told} == set(HOOKS)
    assert trial.result is not None
    assert (trial.result.size, trial.result.samples, trial.result.fits, trial.result.failed_in) == (5, 5, True, "")
    assert trial.result.peak_bytes is None  # on a CPU nobody counts


class _Weights(Callback):
    """The state after three batches, before validation."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.state = {name: value.clone() for name, value in pl_module.state_dict().items()}


def test_a_trial_trains_as_the_run_does() -> None:
    # Both start from one random state, and an unshuffled loader draws one number before the first batch.
    weights, trial = _Weights(), _OneTrial(3)
    for callback in (weights, trial):
        torch.manual_seed(1)
        random.seed(1)
        numpy.random.seed(1)
        new_trainer(callback, max_epochs=1, limit_train_batches=3, limit_val_batches=0).fit(Net(), Data(5))
    torch.testing.assert_close(trial.state, weights.state, rtol=0, atol=0)


class _Scaler(torch.amp.GradScaler):
    """Halves its scale in each of the first steps, as after an overflow, and leaves them out."""

    def __init__(self, skips: int) -> None:
        super().__init__("cpu", 1024.0)
        self.skips = skips

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self.skips -= 1
        return None if self.skips >= 0 else super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: Any = None) -> None:
        super().update(self.get_scale() / 2 if self.skips >= 0 else new_scale)


@pytest.mark.parametrize(("skips", "steps"), [(0, 3), (2, 5), (100, 11)])
def test_steps_that_a_scaler_leaves_out_do_not_count(skips: int, steps: int) -> None:
    net, trial = Net(), _OneTrial(3)
    net.mean.reset()
    plugin = MixedPrecision("16-mixed", "cpu", _Scaler(skips))
    new_trainer(trial, plugins=[plugin], max_epochs=1, max_steps=0, limit_val_batches=0).fit(net, Data(5))
    assert len(net.losses) == steps  # no more than 8 are let off
    assert trial.result is not None
    assert trial.result.fits


def test_a_size_of_few_batches_goes_round_and_no_batch_is_no_trial() -> None:
    net = Net()
    new_trainer(_OneTrial(5, at_hand=60), max_epochs=1, max_steps=0, limit_val_batches=0).fit(net, Data(25))
    assert net.sizes == {25}  # the third batch of 10 is left out

    class Empty(Data):
        def train_dataloader(self) -> Any:
            return DataLoader(dataset(10), 25, drop_last=True)

    with pytest.raises(ValueError, match="There are no training batches"):
        new_trainer(_OneTrial(2), max_epochs=1, limit_val_batches=0).fit(Net(), Empty(25))


class _Prepared(Net):
    def on_fit_start(self) -> None:
        self.factor = 2.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx)["loss"] * self.factor}


def test_what_the_module_makes_when_the_fit_starts_is_there() -> None:
    search = BatchSizeSearch()
    fit(search, _Prepared(13), max_epochs=1)
    assert search.batch_size == 13


class _Manual(Net):
    automatic_optimization = False  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx)["loss"])
        optimizer.step()


def test_manual_optimization() -> None:
    search = BatchSizeSearch()
    _, run = fit(search, _Manual(13, "step"), max_epochs=1)
    assert (search.batch_size, run.global_step) == (13, 5)


def test_throughput_takes_the_smallest_of_the_fast_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    class Timed(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            now[0] += 1.0 if len(batch[0]) <= 8 else len(batch[0]) / 8  # 8 at once take no longer than 1
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr("lightning_speedkit.memory.batch_size_trial.time.perf_counter", lambda: now[0])
    search = BatchSizeSearch(target="throughput")
    fit(search, Timed(), max_epochs=1)
    assert [(t.size, t.seconds) for t in search.trials] == [(2, 1), (4, 1), (8, 1), (16, 2), (32, 4)]
    assert search.batch_size == 8

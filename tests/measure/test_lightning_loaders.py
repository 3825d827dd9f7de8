"""Each private attribute of Lightning's data handling still is what the kit takes it for. A failure here means: read
the new Lightning, then change ``lightning_loaders.py``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_speedkit.measure.lightning_loaders import (
    batch_on_device,
    change_train_dataloaders,
    epochs_done,
    recount_batches,
    trial_batches,
)
from tests.measure.short_fits import Norm, Watch, short_fit


class _Changes(Callback):
    """Gives the run another loader, and keeps what it was asked about."""

    def __init__(self, other: Any) -> None:
        self.other = other
        self.asked: list[Any] = []
        self.undo: Any = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        def change(given: Any) -> Any:
            self.asked.append(given)
            return self.other(given)

        self.undo = change_train_dataloaders(trainer, change)


class _FromHook(Norm):
    def train_dataloader(self) -> Any:
        return DataLoader(torch.arange(4.0).reshape(2, 2, 1), batch_size=None)  # type: ignore[arg-type]


def test_the_training_loaders_can_be_changed_each_time_they_are_asked_for() -> None:
    changes = _Changes(lambda given: DataLoader(torch.rand(3, 2, 1), batch_size=None))  # type: ignore[arg-type]
    steps = Watch()
    short_fit(changes, steps, max_epochs=2, module=_FromHook())
    (given,) = changes.asked
    assert isinstance(given, DataLoader)
    assert len(steps.steps) == 6
    reloaded = _Changes(lambda given: given)
    short_fit(reloaded, max_epochs=3, module=_FromHook(), reload_dataloaders_every_n_epochs=1)
    assert len(reloaded.asked) == 3


def test_a_loader_that_was_made_there_can_be_made_anew_by_lightning() -> None:
    """Lightning records how a loader was made, and what was set on it, while it asks for the loaders."""

    class Own(DataLoader[Any]):
        mark = 0

    def change(given: DataLoader[Any]) -> Own:
        own = Own(given.dataset, batch_size=None, shuffle=True)
        own.mark = 7
        return own

    class Looks(Callback):
        loader: Any = None

        def on_train_start(self, trainer: Any, *rest: Any) -> None:
            Looks.loader = trainer.train_dataloader

    short_fit(_Changes(change), Looks(), max_epochs=1, overfit_batches=2)  # makes it anew, without shuffling
    assert type(Looks.loader) is Own
    assert Looks.loader.mark == 7
    assert isinstance(Looks.loader.sampler, torch.utils.data.SequentialSampler)


def test_a_change_of_the_training_loaders_is_undone() -> None:
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    source = trainer.fit_loop._data_source
    source.instance = "given"  # type: ignore[assignment]
    first = change_train_dataloaders(trainer, lambda given: f"{given} first")
    second = change_train_dataloaders(trainer, lambda given: f"{given} second")
    assert source.dataloader() == "given first second"
    second()
    assert source.dataloader() == "given first"
    first()
    first()
    assert source.dataloader() == "given"
    assert "dataloader" not in vars(source)


def test_a_lightning_without_a_source_of_loaders_is_told() -> None:
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit_loop._data_source = object()  # type: ignore[assignment]
    with pytest.raises(AttributeError, match=r"no _DataLoaderSource\.dataloader"):
        change_train_dataloaders(trainer, lambda given: given)


class _Restored(LightningDataModule):
    """Asks when it is restored, and says that other batches were done if it is told to."""

    def __init__(self, batches: int | None = None) -> None:
        super().__init__()
        self.batches = batches
        self.done: int | None = None

    def train_dataloader(self) -> Any:
        return DataLoader(torch.randn(12, 1), batch_size=2)

    def state_dict(self) -> dict[str, Any]:
        return {"something": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert self.trainer is not None
        self.done = epochs_done(self.trainer)
        if self.batches is not None:
            recount_batches(self.trainer, self.batches)


@pytest.mark.parametrize(("batches", "left"), [(None, 2), (4, 2), (1, 5), (5, 1)])
def test_a_restored_run_has_the_batches_left_that_were_told(tmp_path: Any, batches: int | None, left: int) -> None:
    """6 batches an epoch; the checkpoint is of the second epoch, after 4 of them."""
    save = ModelCheckpoint(tmp_path, filename="a", every_n_train_steps=10)
    quiet: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False}
    Trainer(max_steps=10, callbacks=[save], **quiet).fit(Norm(), datamodule=_Restored())
    watch, data = Watch(), _Restored(batches)
    trainer = Trainer(max_epochs=2, callbacks=[watch], enable_checkpointing=False, **quiet)
    trainer.fit(Norm(), datamodule=data, ckpt_path=tmp_path / "a.ckpt")
    assert data.done == 1
    assert len(watch.steps) == left


class _Tries(Callback):
    """Goes through the training batches twice before training, as ``training_step`` would get them."""

    def __init__(self) -> None:
        self.batches: list[list[float]] = []
        self.loaders: list[bool] = []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        with trial_batches(trainer) as batches:
            for _ in range(2):
                self.batches.append([batch_on_device(trainer, batch).sum().item() for batch in batches])
        self.loaders.append(trainer.train_dataloader is None)


class _Doubles(Norm):
    def on_before_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        return batch * 2

    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        return batch + 1


class _AsksForSteps(_Doubles):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert self.trainer.estimated_stepping_batches == 3
        return super().configure_optimizers()


@pytest.mark.parametrize("module", [_Doubles, _AsksForSteps])
def test_training_batches_can_be_tried_before_they_are_trained_on(module: type[Norm]) -> None:
    tries, watch = _Tries(), Watch()
    short_fit(tries, watch, max_epochs=1, module=module(), limit_train_batches=3)
    assert tries.batches == [[4.0, 12.0, 20.0]] * 2  # 0 + 1, 2 + 3 and 4 + 5, twice, and 1 for each of two numbers
    assert tries.loaders == [module is _Doubles]
    assert watch.steps == [1, 2, 3]
    without = _Tries()
    short_fit(without, max_epochs=1, module=module() if module is _Doubles else _Doubles(), limit_train_batches=0)
    assert without.batches == [[], []]

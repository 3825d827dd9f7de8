"""Each private attribute of Lightning still is what the kit takes it for. A failure here means: read the new Lightning,
then change ``lightning_internals.py``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_speedkit.measure.lightning_internals import (
    change_train_dataloaders,
    epochs_done,
    forget_metric_attributes,
    forget_static_graph_flush,
    is_accumulating,
    recount_batches,
    skips_backward,
)


class _Norm(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.norm(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class _Watch(Callback):
    """What the readers say in each hook of a batch."""

    def __init__(self) -> None:
        self.accumulating: dict[str, list[bool]] = {"start": [], "backward": [], "end": []}
        self.skips: list[bool] = []
        self.steps: list[int] = []

    def on_train_batch_start(self, trainer: Any, *rest: Any) -> None:
        self.accumulating["start"].append(is_accumulating(trainer))

    def on_before_backward(self, trainer: Any, *rest: Any) -> None:
        self.accumulating["backward"].append(is_accumulating(trainer))

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        self.accumulating["end"].append(is_accumulating(trainer))
        self.steps.append(trainer.global_step)
        self.skips.append(skips_backward(trainer))


def _fit(*callbacks: Callback, module: LightningModule | None = None, **options: Any) -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **options,
    )
    trainer.fit(module or _Norm(), DataLoader(torch.arange(10.0).reshape(5, 2, 1), batch_size=None))  # type: ignore[arg-type]


def test_is_accumulating_says_whether_a_step_follows() -> None:
    watch = _Watch()
    _fit(watch, max_epochs=2, accumulate_grad_batches=2)
    expected = [True, False, True, False, False] * 2  # 5 batches, and the last one of an epoch steps
    assert watch.accumulating == {"start": expected, "backward": expected, "end": expected}
    assert watch.steps == [0, 1, 1, 2, 3, 3, 4, 4, 5, 6]


def test_skips_backward_is_true_in_the_epoch_that_weight_averaging_adds() -> None:
    watch = _Watch()
    _fit(watch, StochasticWeightAveraging(0.1, swa_epoch_start=1), max_epochs=2)
    assert watch.skips == [False] * 10 + [True] * 5


def test_the_static_graph_flush_starts_as_not_done_and_is_forgotten() -> None:
    strategy = DDPStrategy(static_graph=True)
    assert strategy._pl_static_graph_delay_done is False
    strategy._pl_static_graph_delay_done = True
    forget_static_graph_flush(strategy)
    assert strategy._pl_static_graph_delay_done is False


def test_a_lightning_without_the_flush_is_told() -> None:
    strategy = DDPStrategy.__new__(DDPStrategy)
    with pytest.raises(AttributeError, match="no DDPStrategy"):
        forget_static_graph_flush(strategy)


class _LogsMetric(_Norm):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.mean.update(batch)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


class _Copies(Callback):
    """Copies the module while it knows its metrics."""

    def __init__(self) -> None:
        self.known: Any = None
        self.copy: LightningModule | None = None

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.known = dict(pl_module._metric_attributes)
        self.copy = copy.deepcopy(pl_module)


def test_metrics_are_known_by_their_ids_and_a_copy_forgets_them() -> None:
    module, copies = _LogsMetric(), _Copies()
    assert module._metric_attributes is None
    _fit(copies, max_epochs=1, module=module)
    assert copies.known == {id(module.mean): "mean"}
    twin = copies.copy
    assert twin is not None
    assert twin._metric_attributes == copies.known
    with pytest.raises(MisconfigurationException, match="Could not find the `LightningModule` attribute"):
        _fit(max_epochs=1, module=twin)
    forget_metric_attributes(twin)
    assert twin._metric_attributes is None
    _fit(max_epochs=1, module=twin)


def test_a_lightning_without_the_names_of_metrics_is_told() -> None:
    with pytest.raises(AttributeError, match=r"no LightningModule\._metric_attributes"):
        forget_metric_attributes(nn.Module())  # type: ignore[arg-type]


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


class _FromHook(_Norm):
    def train_dataloader(self) -> Any:
        return DataLoader(torch.arange(4.0).reshape(2, 2, 1), batch_size=None)  # type: ignore[arg-type]


def test_the_training_loaders_can_be_changed_each_time_they_are_asked_for() -> None:
    changes = _Changes(lambda given: DataLoader(torch.rand(3, 2, 1), batch_size=None))  # type: ignore[arg-type]
    steps = _Watch()
    _fit(changes, steps, max_epochs=2, module=_FromHook())
    (given,) = changes.asked
    assert isinstance(given, DataLoader)
    assert len(steps.steps) == 6
    reloaded = _Changes(lambda given: given)
    _fit(reloaded, max_epochs=3, module=_FromHook(), reload_dataloaders_every_n_epochs=1)
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

    _fit(_Changes(change), Looks(), max_epochs=1, overfit_batches=2)  # makes it anew, without shuffling
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
    Trainer(max_steps=10, callbacks=[save], **quiet).fit(_Norm(), datamodule=_Restored())
    watch, data = _Watch(), _Restored(batches)
    trainer = Trainer(max_epochs=2, callbacks=[watch], enable_checkpointing=False, **quiet)
    trainer.fit(_Norm(), datamodule=data, ckpt_path=tmp_path / "a.ckpt")
    assert data.done == 1
    assert len(watch.steps) == left

"""What is read and set of Lightning's loaders, in a real run."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel, RandomDataset
from torch.utils.data import DataLoader

from lightning_speedkit.measure.lightning_batch_size import (
    forget_train_loaders,
    loader_owner,
    made_train_loader,
    made_val_loaders,
)
from lightning_speedkit.measure.lightning_loaders import batch_on_device


class _Looks(Callback):
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.owner = loader_owner(trainer)
        loader = made_train_loader(trainer)
        self.batches = [batch for batch, *_ in loader]
        loader.reset()
        self.checked = made_val_loaders(trainer)
        self.moved = batch_on_device(trainer, self.batches[0])
        self.untouched = trainer.train_dataloader
        self.forgotten = [forget_train_loaders(trainer)]
        assert trainer.estimated_stepping_batches > 0
        self.forgotten += [forget_train_loaders(trainer), forget_train_loaders(trainer)]


def _fit(model: LightningModule, *data: Any, **options: Any) -> tuple[_Looks, Trainer]:
    looks = _Looks()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 1}
    trainer = Trainer(accelerator="cpu", callbacks=looks, enable_model_summary=False, **{**quiet, **options})  # type: ignore[arg-type]
    trainer.fit(model, *data)
    return looks, trainer


class _Doubles(BoringModel):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return 2 * batch


def test_loaders_are_made_and_fit_makes_its_own() -> None:
    looks, trainer = _fit(_Doubles(), DataLoader(RandomDataset(32, 10), 5))
    assert looks.owner is None
    assert [len(batch) for batch in looks.batches] == [5, 5]
    assert looks.untouched is None
    assert looks.forgotten == [False, True, False]
    assert len(looks.checked) == 1  # the module's own
    assert torch.equal(looks.moved, 2 * looks.batches[0])
    assert trainer.global_step == 2


def test_owners_and_validation() -> None:
    data, model = BoringDataModule(), BoringModel()
    assert _fit(model, data)[0].owner is data
    looks, trainer = _fit(model)
    assert looks.owner is model
    assert len(looks.checked) == 1
    assert len(looks.batches) == trainer.global_step
    assert _fit(model, limit_val_batches=0)[0].checked == []

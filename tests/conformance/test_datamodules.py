"""What every DataModule must keep to: the batches of a plain DataLoader, resume, YAML and two processes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import LightningDataModule
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from lightning_speedkit import LMDBDataModule, SpeedkitCLI, SpeedkitDataModule
from tests.conformance.cases import DATAMODULES
from tests.conformance.models import BATCH, classifier, loader, quiet_trainer, tensors
from tests.two_ranks import on_two_ranks


class InMemory(SpeedkitDataModule):
    def dataset(self, split: str) -> Dataset[Any] | None:
        return TensorDataset(*tensors()) if split in ("train", "val") else None


class Packed(LMDBDataModule):
    def samples(self, split: str) -> Any:
        return TensorDataset(*tensors()) if split in ("train", "val") else None


def _make(name: str, folder: Path, **arguments: Any) -> LightningDataModule:
    if name == "SpeedkitDataModule":
        return InMemory(batch_size=BATCH, **arguments)
    return Packed(folder / "stores", batch_size=BATCH, **arguments)


def _fit(data: LightningDataModule, **arguments: Any) -> Any:
    model = classifier()
    trainer = quiet_trainer([], **{"max_epochs": 2, **arguments})
    torch.manual_seed(3)
    trainer.fit(model, datamodule=data)
    return model, trainer


each = pytest.mark.parametrize("name", DATAMODULES)


@each
@pytest.mark.parametrize("num_workers", [0, 2])
def test_unshuffled_batches_are_those_of_a_plain_dataloader(name: str, num_workers: int, tmp_path: Path) -> None:
    plain = classifier()
    torch.manual_seed(3)
    quiet_trainer([], max_epochs=2).fit(plain, loader(), loader())
    model, _ = _fit(_make(name, tmp_path, shuffle=False, num_workers=num_workers))
    torch.testing.assert_close(model.losses, plain.losses, rtol=0, atol=0)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)


@each
def test_shuffled_resume_sees_the_samples_of_the_unbroken_run(name: str, tmp_path: Path) -> None:
    whole, _ = _fit(_make(name, tmp_path), max_epochs=4)
    _, trainer = _fit(_make(name, tmp_path), max_epochs=2)
    trainer.save_checkpoint(tmp_path / "middle.ckpt")
    random_state = torch.get_rng_state()
    fresh = classifier()
    resumed = quiet_trainer([], max_epochs=4)
    torch.set_rng_state(random_state)
    resumed.fit(fresh, datamodule=_make(name, tmp_path), ckpt_path=tmp_path / "middle.ckpt")
    torch.testing.assert_close(fresh.losses, whole.losses[-len(fresh.losses) :], rtol=0, atol=0)
    torch.testing.assert_close(fresh.state_dict(), whole.state_dict(), rtol=0, atol=0)
    assert len(fresh.losses) == 2 * len(loader())


@each
def test_order_depends_on_seed_and_epoch_and_not_on_the_random_state(name: str, tmp_path: Path) -> None:
    def epoch(seed: int, state: int) -> list[Tensor]:
        torch.manual_seed(state)
        before = torch.get_rng_state()
        batches = [x for x, _ in _make(name, tmp_path, seed=seed).train_dataloader()]
        torch.testing.assert_close(torch.get_rng_state(), before, rtol=0, atol=0)
        return batches

    if name == "LMDBDataModule":
        _make(name, tmp_path).prepare_data()
    torch.testing.assert_close(epoch(0, 1), epoch(0, 2), rtol=0, atol=0)
    assert not torch.equal(torch.cat(epoch(0, 1)), torch.cat(epoch(1, 1)))


def _fit_on_a_rank(name: str, folder: str) -> tuple[dict[str, Tensor], int]:
    model, _ = _fit(_make(name, Path(folder)), strategy="ddp", devices=2)
    return {key: value.clone() for key, value in model.named_parameters()}, len(model.losses)


@each
def test_two_ranks_share_the_samples_and_end_with_the_same_weights(name: str, tmp_path: Path) -> None:
    (first, steps), (second, other_steps) = on_two_ranks(_fit_on_a_rank, name, str(tmp_path))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert steps == other_steps == 2 * len(loader()) // 2


def test_yaml_round_trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    _make("LMDBDataModule", tmp_path).prepare_data()
    settings = {"root": str(tmp_path / "stores"), "batch_size": 3, "shuffle": False, "seed": 5}
    config = {
        "trainer": {"logger": False, "enable_checkpointing": False, "accelerator": "cpu"},
        "data": {"class_path": "lightning_speedkit.LMDBDataModule", "init_args": settings},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    args = ["--config", str(tmp_path / "config.yaml")]
    cli = SpeedkitCLI(
        BoringModel, LightningDataModule, subclass_mode_data=True, run=False, save_config_callback=None, args=args
    )
    x, y = next(iter(cli.datamodule.train_dataloader()))
    torch.testing.assert_close((x, y), (tensors()[0][:3], tensors()[1][:3]), rtol=0, atol=0)

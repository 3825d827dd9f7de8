"""What is taken from a fit that has ended, on Trainers of which only what is read is there."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lightning_speedkit.compress import Pruning, QuantizationAwareTraining, QuantizeOnFitEnd, StructuredPruning
from lightning_speedkit.compress.quantize_fit import (
    is_trial_run,
    monitored,
    validation_data,
    why_untrained,
    with_best_weights,
)
from lightning_speedkit.errors import QuantizationError
from tests.compress.models import Digits, digit_loader, mlp, quiet_trainer

EXACT: dict[str, Any] = {"rtol": 0, "atol": 0}


class _Loaded(Digits):
    def __init__(self) -> None:
        super().__init__(mlp())
        self.epoch_of_the_file = -1

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.epoch_of_the_file = checkpoint["epoch"]


def _best(path: Path | str) -> Any:
    strategy = SimpleNamespace(checkpoint_io=TorchCheckpointIO())
    return SimpleNamespace(checkpoint_callback=SimpleNamespace(best_model_path=str(path)), strategy=strategy)


@pytest.mark.parametrize("extra", [3, argparse.Namespace(lr=0.1)], ids=["plain", "objects-of-the-user"])
def test_the_best_weights_go_into_a_copy(tmp_path: Path, extra: Any) -> None:
    module, best = _Loaded(), _Loaded()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    torch.save({"state_dict": best.state_dict(), "epoch": 7, "extra": extra}, tmp_path / "best.ckpt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        twin: Any = with_best_weights(_best(tmp_path / "best.ckpt"), module)
    torch.testing.assert_close(twin.state_dict(), best.state_dict(), **EXACT)
    torch.testing.assert_close(module.state_dict(), before, **EXACT)
    assert (twin.epoch_of_the_file, module.epoch_of_the_file) == (7, -1)


def test_best_weights_that_cannot_be_had_are_told(tmp_path: Path) -> None:
    with pytest.raises(QuantizationError, match=r"no best checkpoint\. Use weights='last'"):
        with_best_weights(_best(""), _Loaded())
    with pytest.raises(QuantizationError, match=r"gone\.ckpt could not be loaded \(FileNotFoundError"):
        with_best_weights(_best(tmp_path / "gone.ckpt"), _Loaded())
    torch.save({"state_dict": {"a": torch.ones(1)}, "epoch": 0}, tmp_path / "other.ckpt")
    with pytest.raises(QuantizationError, match="could not be loaded"):
        with_best_weights(_best(tmp_path / "other.ckpt"), _Loaded())


def test_trial_runs() -> None:
    def trainer(fast: Any, barebones: bool) -> Any:
        return SimpleNamespace(fast_dev_run=fast, barebones=barebones)

    found = [is_trial_run(trainer(*each)) for each in ((False, False), (3, False), (False, True))]
    assert found == [False, True, True]


def test_watched_metrics_with_their_modes() -> None:
    saving = [ModelCheckpoint(monitor="val_acc", mode="max"), ModelCheckpoint()]
    trainer: Any = SimpleNamespace(checkpoint_callbacks=saving, early_stopping_callbacks=[EarlyStopping("val_loss")])
    assert monitored(trainer) == [("val_acc", "max"), ("val_loss", "min")]


@pytest.mark.parametrize(
    ("batches", "limit", "wanted"),
    [([4, 9], 100, 9), ([4, 9], 5, 5), ([4], None, 4), ([float("inf")], 6, 6), ([float("inf")], None, None)],
)
def test_validation_is_as_long_as_that_of_the_fit_at_most(
    batches: list[float], limit: int | None, wanted: int | None
) -> None:
    trainer: Any = SimpleNamespace(
        val_dataloaders=["loader"], num_val_batches=batches, datamodule=None, precision="32-true"
    )
    data = validation_data(trainer, limit)
    assert data is not None
    assert (data.loaders, data.datamodule, data.limit_batches) == (["loader"], None, wanted)


def test_a_fit_without_validation_has_no_data() -> None:
    trainer: Any = SimpleNamespace(val_dataloaders=None, num_val_batches=[], datamodule=None)
    assert validation_data(trainer, 5) is None


@pytest.mark.parametrize(
    ("precision", "expected"), [("64-true", True), ("bf16-true", True), ("32-true", False), ("16-mixed", False)]
)
def test_batches_become_float32_where_the_fit_turned_them_to_its_own_dtype(precision: str, expected: bool) -> None:
    trainer: Any = SimpleNamespace(val_dataloaders=["l"], num_val_batches=[1], datamodule=None, precision=precision)
    data = validation_data(trainer, None)
    assert data is not None
    assert data.in_float32 is expected


@pytest.mark.parametrize(
    "make",
    [
        lambda: QuantizeOnFitEnd(backend="torch-ao-dynamic"),
        lambda: QuantizationAwareTraining(),
        lambda: Pruning(),
        lambda: StructuredPruning(),
    ],
)
@pytest.mark.parametrize(
    ("limits", "why"),
    [
        ({"max_epochs": 0}, "max_epochs=0 asks for none"),
        ({"max_steps": 0}, "max_steps=0 asks for none"),
        ({"limit_train_batches": 0}, "limit_train_batches=0 asks for none"),
        ({"max_epochs": 1}, "max_epochs=1 was reached before"),
        ({"max_epochs": 0, "fast_dev_run": True}, None),
    ],
)
def test_a_fit_that_trains_no_batch_is_told_once_by_each_callback(make: Any, limits: Any, why: str | None) -> None:
    callback, model = make(), Digits(mlp())
    trainer = quiet_trainer(callbacks=[callback], **limits)
    if "before" in (why or ""):
        pytest.importorskip("torch_pruning")
        trainer.fit(model, digit_loader(0, 64))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, digit_loader(0, 64))
    told = [str(one.message) for one in caught if "no batch was trained" in str(one.message)]
    assert len(told) == (why is not None)
    if why:
        assert told[0].startswith(f"{type(callback).__name__} did nothing: no batch was trained ({why}")


def test_a_loader_that_gives_nothing_is_named() -> None:
    trainer: Any = SimpleNamespace(max_epochs=2, max_steps=-1, limit_train_batches=1.0, current_epoch=0, global_step=0)
    assert why_untrained(trainer) == "the training loader gave none"

"""The best checkpoint beside channels that went after it was written."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_speedkit.compress.quantize import QuantizeOnFitEnd
from lightning_speedkit.compress.shrink import StructuredPruning
from tests.compress.models import Digits, digit_loader, quiet_trainer

# weights and biases of 64 x 32 and 32 x 10, and of 64 x 16 and 16 x 10
WHOLE, HALF = 64 * 32 + 32 + 32 * 10 + 10, 64 * 16 + 16 + 16 * 10 + 10


class Epochs(Digits):
    """Logs the number of the epoch."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        self.log("epoch_number", float(self.current_epoch))
        return super().validation_step(batch, batch_idx)


def _told(tmp_path: Path, mode: str, weights: str = "best", flip: bool = False, **arguments: Any) -> list[str]:
    quantize = QuantizeOnFitEnd(
        backend="torch-ao-dynamic", objective="size", max_metric_drop=1.0, weights=weights, folder=str(tmp_path / "q")
    )
    callbacks = [StructuredPruning(folder=str(tmp_path), **{"ratio": 0.5, **arguments}), quantize]
    checkpoint = ModelCheckpoint(tmp_path, monitor="epoch_number", mode=mode)
    trainer = quiet_trainer(
        callbacks=[*(callbacks[::-1] if flip else callbacks), checkpoint], enable_checkpointing=True, max_epochs=3
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(Epochs(), digit_loader(0, 128), digit_loader(1024, 1088))
    assert quantize.report is not None
    assert quantize.report.weights == weights
    return [str(one.message) for one in told if "QuantizeOnFitEnd(weights='best')" in str(one.message)]


@pytest.mark.parametrize("flip", [False, True], ids=["before", "after"])
def test_a_best_checkpoint_from_before_the_cut_is_told_once(tmp_path: Path, flip: bool) -> None:
    (told,) = _told(tmp_path, "min", flip=flip)
    assert f"epoch=0-step=2.ckpt has {WHOLE:,} parameters, the network at the end {HALF:,}" in told


def test_one_from_between_two_cuts_is_told(tmp_path: Path) -> None:
    (told,) = _told(tmp_path, "min", steps=2, start_epoch=0)
    assert f"has {64 * 24 + 24 + 24 * 10 + 10:,} parameters, the network at the end {HALF:,}" in told


@pytest.mark.parametrize(
    ("mode", "weights", "ratio"),
    [("max", "best", 0.5), ("min", "last", 0.5), ("min", "best", 0.0)],
    ids=["best is from the end", "last weights", "nothing cut"],
)
def test_nothing_is_told_where_sizes_are_those_of_the_end(
    tmp_path: Path, mode: str, weights: str, ratio: float
) -> None:
    assert _told(tmp_path, mode, weights, ratio=ratio) == []

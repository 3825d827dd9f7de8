"""A DataModule and a model that the tests of the DataModules share: each sample says which one it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_speedkit.data import LMDBDataModule

SIZES = {"train": 24, "val": 6, "test": 7, "predict": 5}


class Numbers(LMDBDataModule):
    """Samples ``(vector, number)``, whose number says which they are."""

    def samples(self, split: str) -> Iterator[tuple[torch.Tensor, int]] | None:
        return ((torch.full((4,), i / 10), i) for i in range(SIZES[split]))


class Recorder(LightningModule):
    """A linear model that remembers the numbers of the batches that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.seen: dict[str, list[list[int]]] = {split: [] for split in SIZES}

    def _take(self, split: str, batch: Any) -> torch.Tensor:
        assert type(batch) is tuple
        vectors, numbers = batch
        assert numbers.dtype == torch.int64
        torch.testing.assert_close(vectors, (numbers / 10)[:, None].expand(-1, 4))
        self.seen[split].append(numbers.tolist())
        return self.layer(vectors).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self._take("train", batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self._take("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._take("test", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self._take("predict", batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def trainer(**arguments: Any) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(**{"accelerator": "cpu", "devices": 1, "enable_model_summary": False, **quiet, **arguments})


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]

"""The same loading through whole epochs of a Lightning Trainer with a model that does nothing: what Lightning costs."""

from __future__ import annotations

import importlib
import statistics
import time
from typing import Any

from benchmarks.data.datasets import dataset
from benchmarks.data.measuring import cpu_seconds, held_bytes

__all__ = ["measure"]


def measure(way: str, data: str, workers: int = 2, epochs: int = 3, small: bool = False) -> dict[str, float]:
    """As :func:`benchmarks.data.measuring.measure`, each epoch from its first hook to its last."""
    from lightning.pytorch import Callback, LightningModule, Trainer

    found = dataset(data, small=small)

    class Empty(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.samples = 0

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.samples += len(batch[1])

        def configure_optimizers(self) -> None:
            return None

    class Watch(Callback):
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.processor: list[float] = []

        def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self.start, self.before = time.perf_counter(), cpu_seconds()

        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self.seconds.append(time.perf_counter() - self.start)
            self.processor.append(cpu_seconds() - self.before)

    module, _, name = way.rpartition(".")
    model, watch = Empty(), Watch()
    with getattr(importlib.import_module(module), name)(found, workers) as epoch:
        trainer = Trainer(
            max_epochs=epochs + 1,
            accelerator="cpu",
            devices=1,
            callbacks=[watch],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, epoch(0))
        held = held_bytes()
    if model.samples != found.samples * (epochs + 1):
        raise ValueError(f"{model.samples} samples came in {epochs + 1} epochs of {found.samples}.")
    rate = found.samples / statistics.median(watch.seconds[1:])
    return {
        "samples_per_second": rate,
        "bytes_per_second": rate * found.bytes_per_sample,
        "cpu_seconds_per_epoch": statistics.median(watch.processor[1:]),
        "peak_bytes": float(held),
    }

"""A small network learns the digits, and some of its batches are bad; see ``benchmarks/spikes.py``."""

from __future__ import annotations

import functools
import importlib
import math
import tempfile
import warnings
from typing import Any, NamedTuple

from lightning_speedkit.errors import DivergenceError

__all__ = ["NAN_BATCHES", "Run", "batches_of", "digits", "train"]

BATCH, NAN_BATCHES = 32, 5
_GUARDS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "none": [],
    "non-finite": [("non_finite_guard.NonFiniteGuard", {})],
    "skip": [("spike_guard.SpikeGuard", {})],
    "skip, deviations=0": [("spike_guard.SpikeGuard", {"deviations": 0.0})],
    "rollback": [("spike_guard.SpikeGuard", {"action": "rollback"})],
    "clipping": [("clip.GradientClipping", {"by": "zclip"})],
}


class Run(NamedTuple):
    """What became of one training run."""

    final_loss: float  # on the validation set; may be NaN
    losses: list[float]  # of every batch in training
    acted: int  # steps that a guard left out
    taken_back: int  # steps that a rollback undid
    stopped: bool  # by a guard, since it acted too often


@functools.cache
def train(
    epochs: int,
    optimizer: str,
    rate: float,
    guard: str,
    faults: str,
    seed: int,
    *,
    left_out: bool = False,
    more: int = 0,
) -> Run:
    """One run. ``left_out`` leaves the bad batches out; ``more`` adds so many batches at the end."""
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from torch import nn
    from torch.utils.data import DataLoader

    images, labels, learnt, held_out = digits()
    steps = epochs * (len(learnt) // BATCH)
    batches = batches_of(images, labels, learnt, steps, faults, seed, left_out, more)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            layers = (nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
            self.net = nn.Sequential(nn.Flatten(), *layers)
            self.losses: list[float] = []

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.losses.append(loss.item())
            if faults == "gradient" and batch_idx == steps // 3:
                return loss + 999 * (loss - loss.detach())  # the same number, and 1000 times its gradient
            return loss

        def configure_optimizers(self) -> Any:
            if optimizer == "sgd":
                chosen: torch.optim.Optimizer = torch.optim.SGD(self.parameters(), lr=rate, momentum=0.9)
            else:
                chosen = torch.optim.AdamW(self.parameters(), lr=rate)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(chosen, steps + more)
            return {"optimizer": chosen, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    torch.manual_seed(seed)
    model, callbacks = Module(), [_built(path, arguments) for path, arguments in _GUARDS[guard]]
    stopped = False
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            max_epochs=1,  # all epochs in one list
            accelerator="cpu",
            devices=1,
            callbacks=callbacks,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        try:
            trainer.fit(model, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
        except DivergenceError:
            stopped = True
    with torch.no_grad():
        final = nn.functional.cross_entropy(model.eval().net(images[held_out]), labels[held_out]).item()
    acted = sum(getattr(c, "spikes", 0) + getattr(c, "skipped_steps", 0) for c in callbacks)
    return Run(final, model.losses, acted, sum(getattr(c, "taken_back", 0) for c in callbacks), stopped)


def digits() -> tuple[Any, Any, Any, Any]:
    """Images, labels, and the places of those that are learnt from and of the others."""
    import torch

    from lightning_speedkit.demo.digits import load_digits, split_indices

    pixels, classes = load_digits()
    images, labels = torch.from_numpy(pixels).float() / 16, torch.from_numpy(classes).long()
    others = split_indices("val") + split_indices("test")
    return images, labels, torch.tensor(split_indices("train")), torch.tensor(others)


def batches_of(
    images: Any, labels: Any, learnt: Any, steps: int, faults: str, seed: int, left_out: bool, more: int
) -> list[Any]:
    """The batches of a run, one after the other."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    batches: list[Any] = []
    while len(batches) < steps + more:
        order = learnt[torch.randperm(len(learnt), generator=generator)]
        batches += [[images[chosen], labels[chosen]] for chosen in order.split(BATCH) if len(chosen) == BATCH]
    del batches[steps + more :]
    bad = []
    if faults in ("spike", "both"):
        bad, (x, y) = [steps // 3], batches[steps // 3]
        batches[steps // 3] = [x * 1000, y[torch.randperm(len(y), generator=generator)]]
    if faults in ("nan", "both"):
        bad += range(2 * steps // 3, 2 * steps // 3 + NAN_BATCHES)
        for place in bad[-NAN_BATCHES:]:
            batches[place] = [batches[place][0] * math.nan, batches[place][1]]
    return [batch for place, batch in enumerate(batches) if not (left_out and place in bad)]


def _built(path: str, arguments: dict[str, Any]) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"lightning_speedkit.optimize.{module}"), name)(**arguments)

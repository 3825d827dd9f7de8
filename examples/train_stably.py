"""A run with bad batches: without guards it is lost, with them it ends like the run in which nothing was wrong.

    python examples/train_stably.py            # the digits that ship with the package
    python examples/train_stably.py --fast     # fewer epochs

A third through, the pixels of one batch are a thousand times too large and its labels wrong; two thirds through, three
batches are not numbers. The module names its optimizer and schedule, and the schedule waits where a step is skipped.
"""

import argparse

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_speedkit import GradientClipping, NonFiniteGuard, SpikeGuard, optimizers_for
from lightning_speedkit.demo.digits import load_digits, split_indices


def loader(split: str) -> DataLoader:
    images, labels = (torch.from_numpy(array[split_indices(split)]) for array in load_digits())
    return DataLoader(TensorDataset(images.float().unsqueeze(1) / 16, labels.long()), 32, shuffle=split == "train")


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        convolutions = nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()
        self.net = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(512, 10))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_acc", (self.net(batch[0]).argmax(dim=1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return optimizers_for(self, "sgd-momentum", "warmup-cosine", lr=0.1, weight_decay=1e-4)


class Faults(Callback):
    """Spoils some batches, as a broken file would."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        number = trainer.current_epoch * trainer.num_training_batches + batch_idx
        third = trainer.max_epochs * trainer.num_training_batches // 3
        if number == third:
            batch[0].mul_(1000)
            batch[1].copy_(batch[1].roll(1))
        elif 2 * third <= number < 2 * third + 3:
            batch[0].fill_(float("nan"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fast", action="store_true", help="fewer epochs")
    epochs = 2 if parser.parse_args().fast else 8
    non_finite, spikes = NonFiniteGuard(), SpikeGuard(margin=1.0)  # below 1 above the mean is no spike here
    runs = {
        "nothing wrong": [],
        "bad batches": [Faults()],
        "bad batches, clipped": [Faults(), GradientClipping("norm", limit=1.0)],
        "bad batches, clipped and guarded": [Faults(), GradientClipping("norm", limit=1.0), non_finite, spikes],
    }
    for name, callbacks in runs.items():
        seed_everything(0, verbose=False)
        quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
        trainer = Trainer(max_epochs=epochs, callbacks=callbacks, enable_progress_bar=False, **quiet)
        trainer.fit(Classifier(), loader("train"), loader("val"))
        accuracy = trainer.callback_metrics["val_acc"]
        print(f"{name}: {trainer.global_step} steps, validation accuracy {accuracy:.3f}")
    print(f"SpikeGuard found {spikes.spikes} losses that spike or are no numbers,", end=" ")
    print(f"NonFiniteGuard {non_finite.skipped_steps} gradients that are none")


if __name__ == "__main__":
    main()

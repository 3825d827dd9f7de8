"""Find a learning rate by a range test, then train with it: plainly, with averaged weights, and without a schedule.

    python examples/find_learning_rate.py                     # draws learning-rates.svg; needs matplotlib
    python examples/find_learning_rate.py --fast --plot a.png # fewer epochs, another file

The module stays as it is: callbacks test, average, and choose another optimizer.
"""

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_speedkit import AverageWeights, LRRangeTest, OptimizerChoice, ScheduleChoice
from lightning_speedkit.demo.digits import load_digits, split_indices


def loader(split: str) -> DataLoader:
    images, labels = (torch.from_numpy(array[split_indices(split)]) for array in load_digits())
    return DataLoader(TensorDataset(images.float().unsqueeze(1) / 16, labels.long()), 32, shuffle=split == "train")


class Classifier(LightningModule):
    def __init__(self, lr: float = 1e-3) -> None:
        super().__init__()
        self.lr = lr
        convolutions = nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()
        self.net = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(512, 10))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), batch_size=len(batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def fit(model: Classifier, *callbacks, **arguments) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = Trainer(callbacks=list(callbacks), enable_progress_bar=False, **quiet, **arguments)
    trainer.fit(model, loader("train"), loader("val"))
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fast", action="store_true", help="fewer epochs")
    parser.add_argument("--plot", default="learning-rates.svg", help="the file to draw the curve in (%(default)s)")
    arguments = parser.parse_args()

    seed_everything(0, verbose=False)
    test = LRRangeTest(lowest=1e-6, highest=1.0, steps=100, plot=arguments.plot)
    fit(Classifier(), test, max_steps=0)  # only the test
    rate = test.result.suggestion
    if rate is None:
        raise SystemExit(f"No rate stands out of the noise; look at {arguments.plot}.")
    print(f"Range test: {len(test.result.losses)} steps, suggestion {rate:.2g}; the curve is in {arguments.plot}")

    runs = {
        "one rate": [],
        "one rate, averaged weights": [AverageWeights("ema", decay=0.99)],
        "a schedule": [ScheduleChoice("warmup-cosine")],
        "schedule-free": [OptimizerChoice("schedule-free", options={"warmup_steps": 20})],
    }
    for name, callbacks in runs.items():
        seed_everything(0, verbose=False)
        trainer = fit(Classifier(rate), *callbacks, max_epochs=1 if arguments.fast else 5)
        print(f"{name}: validation loss {trainer.callback_metrics['val_loss']:.4f}")


if __name__ == "__main__":
    main()

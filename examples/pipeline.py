"""A classifier whose layers lie on two processes: each holds half of them, the module is the one for one process.

    python examples/pipeline.py            # the digits that ship with the package, on two CPU processes
    python examples/pipeline.py --fast     # one epoch

The Trainer starts the second process. Afterwards the module has all its layers and weights again, in both.
"""

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_speedkit import PipelineStrategy
from lightning_speedkit.demo.digits import load_digits, split_indices


def loader(split: str) -> DataLoader:
    images, labels = (torch.from_numpy(array[split_indices(split)]) for array in load_digits())
    return DataLoader(TensorDataset(images.float().flatten(1) / 16, labels.long()), 64, shuffle=split == "train")


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, 128),
            nn.ReLU(),
            nn.Linear(128, 128),
            nn.ReLU(),
            nn.Linear(128, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_acc", (self.net(batch[0]).argmax(dim=1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fast", action="store_true", help="one epoch")
    arguments = parser.parse_args()
    seed_everything(0, verbose=False)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(
        strategy=PipelineStrategy("net", microbatches=4),
        accelerator="cpu",
        devices=2,
        max_epochs=1 if arguments.fast else 10,
        **quiet,
    )
    model = Classifier()
    trainer.fit(model, loader("train"), loader("val"))
    if trainer.is_global_zero:
        accuracy = float(trainer.callback_metrics["val_acc"])
        weights = sum(parameter.numel() for parameter in model.parameters())
        print(f"accuracy {accuracy:.3f} on held-out digits; {weights} weights, trained on 2 processes")


if __name__ == "__main__":
    main()

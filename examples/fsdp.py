"""A classifier whose weights, gradients and optimizer state are sharded over two processes; the module is a plain one.

    python examples/fsdp.py            # the digits that ship with the package, on two CPU processes
    python examples/fsdp.py --fast     # one epoch

The Trainer starts the second process. Afterwards the module has whole weights again, in both.
"""

import argparse

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_speedkit import ModelParallelPlan
from lightning_speedkit.demo.digits import load_digits, split_indices


def loader(split: str) -> DataLoader:
    images, labels = (torch.from_numpy(array[split_indices(split)]) for array in load_digits())
    return DataLoader(TensorDataset(images.float().flatten(1) / 16, labels.long()), 32, shuffle=split == "train")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(Block(), Block(), nn.Linear(64, 10))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_acc", (self.net(batch[0]).argmax(dim=1) == batch[1]).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Count(Callback):
    def on_train_start(self, trainer, pl_module):
        self.held = sum(parameter.to_local().numel() for parameter in pl_module.parameters())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fast", action="store_true", help="one epoch")
    arguments = parser.parse_args()
    seed_everything(0, verbose=False)
    count = Count()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(
        strategy=ModelParallelPlan(shard_class=["Block"]),
        accelerator="cpu",
        devices=2,
        callbacks=[count],
        max_epochs=1 if arguments.fast else 8,
        **quiet,
    )
    model = Classifier()
    trainer.fit(model, loader("train"), loader("val"))
    if trainer.is_global_zero:
        accuracy = float(trainer.callback_metrics["val_acc"])
        weights = sum(parameter.numel() for parameter in model.parameters())
        print(f"accuracy {accuracy:.3f} on held-out digits; each process held {count.held} of {weights} weights")


if __name__ == "__main__":
    main()

"""Find the largest batch that trains, and the smallest that trains as fast, before training with one of them.

    python examples/largest_batch.py         # up to 512 samples
    python examples/largest_batch.py --fast  # up to 64

A machine without a GPU has no memory limit worth waiting for, so this model says itself that 300 samples are its most.
"""

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_speedkit import BatchSizeSearch
from lightning_speedkit.demo.digits import load_digits, split_indices

MOST = 300


def loader(split: str) -> DataLoader:
    images, labels = (torch.from_numpy(array[split_indices(split)]) for array in load_digits())
    return DataLoader(TensorDataset(images.float().flatten(1) / 16, labels.long()), 32, shuffle=split == "train")


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch, batch_idx):
        if len(batch[1]) > MOST:
            raise torch.OutOfMemoryError("This stands for the memory of a GPU.")
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), batch_size=len(batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fast", action="store_true", help="smaller batches")
    limit = 64 if parser.parse_args().fast else 512
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}

    for target in ("memory", "throughput"):
        seed_everything(0, verbose=False)
        search = BatchSizeSearch(start=8, limit=limit, target=target, scale_lr="sqrt")
        trainer = Trainer(callbacks=[search], enable_progress_bar=False, max_epochs=1, accelerator="cpu", **quiet)
        trainer.fit(Classifier(), loader("train"), loader("val"))
        tried = ", ".join(f"{t.size}{'' if t.fits else ' (too large)'}" for t in search.trials)
        print(f"{target}: batch size {search.batch_size} of {tried}")
        print(f"  {trainer.global_step} steps, validation loss {trainer.callback_metrics['val_loss']:.3f}")


if __name__ == "__main__":
    main()

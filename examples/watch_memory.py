"""A run that is out of memory, with what filled it; a run that leaks, found and named, and its peaks by phase.

python examples/watch_memory.py            # the digits that ship with the package
python examples/watch_memory.py --fast     # fewer batches
"""

import argparse
import tempfile
import warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_speedkit import CacheRelease, LeakMonitor, OOMSnapshot, PeakMemory
from lightning_speedkit.demo.digits import load_digits, split_indices


def loader(batch_size: int) -> DataLoader:
    images, labels = (torch.from_numpy(array[split_indices("train")]) for array in load_digits())
    return DataLoader(TensorDataset(images.float().flatten(1) / 16, labels.long()), batch_size)


class Classifier(LightningModule):
    def __init__(self, room: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        self.room, self.losses = room, []

    def training_step(self, batch, batch_idx):
        if len(batch[0]) > self.room:  # as a device would say it
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss)  # the fault: each loss keeps its graph, and all that it was computed from
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fast", action="store_true", help="fewer batches")
    epochs = 2 if parser.parse_args().fast else 4
    warnings.simplefilter("ignore")
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    quiet |= {"enable_progress_bar": False, "accelerator": "cpu", "max_epochs": epochs}

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(callbacks=[OOMSnapshot(folder=folder)], **quiet)
        try:
            trainer.fit(Classifier(room=16), loader(32))
        except torch.OutOfMemoryError as error:
            print(f"the run ended with: {error}")
            print(Path(folder, "out-of-memory-rank0.txt").read_text())

    leaks, peaks, release = LeakMonitor(), PeakMemory(), CacheRelease()
    trainer = Trainer(callbacks=[leaks, peaks, release], **quiet)
    trainer.fit(Classifier(room=16), loader(8), loader(64))
    for leak in leaks.leaks:
        print(f"leak: {leak.describe()}")
    for phase, peak in peaks.peaks.items():
        print(f"peak in {phase}: {peak.host_bytes / 2**20:.0f} MiB on the host" if peak.host_bytes else phase)
    print(f"memory was released {release.releases} times")


if __name__ == "__main__":
    main()

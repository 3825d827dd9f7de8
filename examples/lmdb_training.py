"""Train from LMDB instead of image files: subclass LMDBDataModule and say where the samples come from.

    python examples/lmdb_training.py            # the digits that ship with the package
    python examples/lmdb_training.py --fast     # a few steps

The first fit packs each split once; later ones find the stores. The LightningModule needs no change.
"""

import argparse
import tempfile
from pathlib import Path

import numpy
import torch
from lightning.pytorch import LightningModule, Trainer
from PIL import Image
from torch import nn

from lightning_speedkit import LMDBDataModule, RunRecorder, verify_lmdb
from lightning_speedkit.demo.digits import write_image_folder


class Digits(LMDBDataModule):
    """An image folder, ``images/<split>/<label>/<name>.png``, packed into ``root/<split>.lmdb``."""

    def __init__(self, root: str, images: str, batch_size: int = 64) -> None:
        super().__init__(root, batch_size=batch_size)
        self.images = Path(images)

    def samples(self, split):
        """Called for each split that has no store yet; decode here what would otherwise be decoded every epoch."""
        files = sorted(self.images.glob(f"{split}/*/*.png"))
        return (self.decoded(file) for file in files) if files else None

    @staticmethod
    def decoded(file: Path):
        with Image.open(file) as image:
            return torch.from_numpy(numpy.array(image)).unsqueeze(0), int(file.parent.name)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        """Stored as uint8, turned into floats as a whole batch, on the device."""
        images, labels = batch
        return images.float() / 255, labels


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("val_acc", (self.net(images).argmax(dim=1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fast", action="store_true", help="few images, one epoch")
    fast = parser.parse_args().fast
    with tempfile.TemporaryDirectory() as folder:
        write_image_folder(f"{folder}/images", limit=64 if fast else None)
        data, recorder = Digits(f"{folder}/stores", f"{folder}/images", batch_size=8 if fast else 64), RunRecorder()
        trainer = Trainer(max_epochs=1 if fast else 5, callbacks=[recorder], logger=False, default_root_dir=folder)
        trainer.fit(Classifier(), datamodule=data)
        print(verify_lmdb(data.path("train")))
        print(recorder.run.train.describe())


if __name__ == "__main__":
    main()

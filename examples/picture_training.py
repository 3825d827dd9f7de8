"""From a folder of JPEG files to a run that can be stopped anywhere: pack, stage, decode into the batch, resume.

    python examples/picture_training.py            # tiles of the two photographs that scikit-learn ships
    python examples/picture_training.py --fast     # fewer tiles, fewer epochs

The run is stopped in the middle of an epoch, and goes on with the samples that are left.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import nn

from lightning_speedkit import ImageField, LMDBDataModule, RunRecorder, stage_to_local
from lightning_speedkit.data import DeviceTransform, Normalize, RandomFlip, find_splits, open_source, write_parallel


def write_tiles(folder: Path, per_class: int) -> None:
    """train/china/1.jpg and so on, as image datasets are laid out."""
    for photograph, name in zip(load_sample_images().images, ("china", "flower"), strict=True):
        for i in range(per_class):
            top, left = 37 * i % (427 - 96), 71 * i % (640 - 96)
            path = folder / ("val" if i % 5 == 0 else "train") / name / f"{i}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(photograph[top : top + 96, left : left + 96]).save(path, quality=90)


class Pictures(LMDBDataModule):
    def fields(self, split):  # 0: the first element of a sample, the encoded picture
        return {0: ImageField(48, crop="random" if split == "train" else "center")}

    def device_transform(self):
        return DeviceTransform(train=[RandomFlip()], always=[Normalize(mean=0.45, std=0.25)])


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        convolutions = nn.Conv2d(3, 16, 5, stride=3), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU()
        self.net = nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 2))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_acc", (self.net(batch[0]).argmax(dim=1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fast", action="store_true", help="fewer tiles, fewer epochs")
    fast = parser.parse_args().fast
    with tempfile.TemporaryDirectory() as folder:
        files, stores, checkpoint = (Path(folder, name) for name in ("photographs", "stores", "stopped.ckpt"))
        write_tiles(files, per_class=40 if fast else 200)
        for split, path in find_splits(files).items():  # the command for it: speedkit pack photographs stores
            write_parallel(open_source(path), stores / f"{split}.lmdb")
        root = stage_to_local(stores)  # already on a local disk: it stays there
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        stop = ModelCheckpoint(folder, every_n_train_steps=3, filename="stopped")
        Trainer(max_steps=3, callbacks=[stop], **quiet).fit(Classifier(), datamodule=Pictures(root, batch_size=8))
        recorder = RunRecorder(warmup_steps=1)
        rest = Trainer(max_epochs=2 if fast else 6, callbacks=[recorder], enable_checkpointing=False, **quiet)
        rest.fit(Classifier(), datamodule=Pictures(root, batch_size=8), ckpt_path=checkpoint)
        print(f"Validation accuracy {rest.callback_metrics['val_acc']:.3f} after {rest.global_step} steps")
        print(recorder.run.train.describe())


if __name__ == "__main__":
    main()

"""Augment and normalise whole batches on the device: one method of the DataModule, no change of the LightningModule.

    python examples/device_augmentation.py            # the digits that ship with the package
    python examples/device_augmentation.py --fast     # a few steps

Images are served as uint8. What is drawn for a batch depends on the seed, the epoch and the batch alone, so a resumed
run augments as the unbroken one. A module of kornia or torchvision.transforms.v2 may stand in the list as it is.
"""

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import TensorDataset

from lightning_speedkit import RunRecorder, SpeedkitDataModule
from lightning_speedkit.data import CutMix, DeviceTransform, MixUp, Normalize, RandomCrop, RandomErase
from lightning_speedkit.demo.digits import load_digits, split_indices

CLASSES = 10


class Digits(SpeedkitDataModule):
    def __init__(self, limit: int | None = None) -> None:
        super().__init__(batch_size=32)
        self.limit = limit

    def dataset(self, split):
        images, labels = load_digits()
        indices = split_indices(split)[: self.limit]
        pixels = torch.from_numpy(images[indices] * 15).unsqueeze(1)  # 0 to 16, as 0 to 240
        return TensorDataset(pixels, torch.from_numpy(labels[indices]).long())

    def device_transform(self):
        return DeviceTransform(
            train=[
                RandomCrop(8, padding=1),
                RandomErase(probability=0.3, area=(0.02, 0.2)),
                MixUp(classes=CLASSES, alpha=0.2, probability=0.5),
                CutMix(classes=CLASSES, probability=0.2),
            ],
            always=[Normalize(mean=0.29, std=0.35)],
        )


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        convolutions = nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2), nn.ReLU()
        self.net = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(576, CLASSES))

    def training_step(self, batch, batch_idx):
        images, labels = batch  # labels are probabilities in training, which cross_entropy takes as they are
        return nn.functional.cross_entropy(self.net(images), labels)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("val_acc", (self.net(images).argmax(dim=1) == labels).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fast", action="store_true", help="few images, one epoch")
    fast = parser.parse_args().fast
    data, recorder = Digits(limit=128 if fast else None), RunRecorder(warmup_steps=1)
    trainer = Trainer(max_epochs=1 if fast else 8, callbacks=[recorder], logger=False, enable_checkpointing=False)
    trainer.fit(Classifier(), datamodule=data)
    print(f"Validation accuracy {trainer.callback_metrics['val_acc']:.3f} on images that are neither cropped nor mixed")
    print(recorder.run.train.describe())


if __name__ == "__main__":
    main()

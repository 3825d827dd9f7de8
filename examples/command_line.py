"""Optimizer, schedule, clipping and guards by name, from a file: LightningCLI with a list of presets.

    python examples/command_line.py                                         # fit with command_line.yaml, beside it
    python examples/command_line.py fit --config examples/command_line.yaml --trainer.max_epochs 3
    python examples/command_line.py fit --config examples/command_line.yaml --presets+ ema
    python examples/command_line.py fit --help

The module below knows nothing of it. Needs the extra "cli".
"""

import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, TensorDataset

from lightning_speedkit import SpeedkitCLI
from lightning_speedkit.demo.digits import load_digits, split_indices
from lightning_speedkit.demo.model import DigitNet


class Digits(LightningDataModule):
    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size

    def loader(self, split: str) -> DataLoader:
        images, labels = (torch.from_numpy(array[split_indices(split)]) for array in load_digits())
        pixels = interpolate(images.float().div(16).sub(0.3).unsqueeze(1), size=32, mode="bilinear")
        return DataLoader(TensorDataset(pixels, labels.long()), self.batch_size, shuffle=split == "train")

    def train_dataloader(self) -> DataLoader:
        return self.loader("train")

    def val_dataloader(self) -> DataLoader:
        return self.loader("val")


def main() -> None:
    beside = ["fit", "--config", str(Path(__file__).with_suffix(".yaml"))]
    cli = SpeedkitCLI(DigitNet, Digits, args=sys.argv[1:] or beside, save_config_callback=None)
    if cli.trainer.optimizers:
        (optimizer,) = cli.trainer.optimizers
        print(f"Callbacks: {', '.join(type(callback).__name__ for callback in cli.trainer.callbacks)}")
        print(f"{type(optimizer).__name__}, fused: {optimizer.param_groups[0].get('fused')}")
        print(f"Validation accuracy {cli.trainer.callback_metrics['val_acc']:.3f}")


if __name__ == "__main__":
    main()

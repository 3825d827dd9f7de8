"""Prune, train on and quantize in one run: 80 % of the weights as zeros, or half of the units gone, and int8.

    python examples/prune_and_quantize.py            # the digits that ship with the package
    python examples/prune_and_quantize.py --fast     # fewer epochs

Zeros make the file smaller once it is compressed. Removing units makes the network itself smaller, and int8 its
numbers. The module that was trained stays in float, so that it can be tested, resumed and saved.
"""

import argparse
import io
import tempfile
import zlib

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_speedkit import Pruning, QuantizeOnFitEnd, StructuredPruning
from lightning_speedkit.demo.digits import load_digits, split_indices


def loader(split: str) -> DataLoader:
    images, labels = (torch.from_numpy(array[split_indices(split)]) for array in load_digits())
    return DataLoader(TensorDataset(images.float().flatten(1) / 16, labels.long()), 32, shuffle=split == "train")


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        hidden = nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()
        self.net = nn.Sequential(*hidden, nn.Linear(256, 10))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_acc", (self(batch[0]).argmax(dim=1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def zipped_bytes(model: nn.Module) -> int:
    file = io.BytesIO()
    torch.save({name: value for name, value in model.state_dict().items() if name.endswith("weight")}, file)
    return len(zlib.compress(file.getvalue()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fast", action="store_true", help="fewer epochs")
    epochs = 4 if parser.parse_args().fast else 20
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    ways = {
        "whole": [],
        "80 % zeros": [Pruning(0.8)],
        "half of the units": [StructuredPruning(0.5, start_epoch=epochs // 2)],
    }
    for name, callbacks in ways.items():
        seed_everything(0, verbose=False)
        quantize, model = QuantizeOnFitEnd(max_metric_drop=0.02), Classifier()
        with tempfile.TemporaryDirectory() as folder:
            quiet |= {"default_root_dir": folder, "enable_progress_bar": False}
            trainer = Trainer(max_epochs=epochs, callbacks=[*callbacks, quantize], **quiet)
            trainer.fit(model, loader("train"), loader("val"))
        weights = [layer.weight for layer in model.net if isinstance(layer, nn.Linear)]
        zeros, total = sum(int((w == 0).sum()) for w in weights), sum(w.numel() for w in weights)
        accuracy, size = trainer.callback_metrics["val_acc"], zipped_bytes(model)
        print(f"{name}: {zeros} of {total} weights are zero, accuracy {accuracy:.3f}, {size} bytes zipped")
        print(f"  {quantize.report.describe()}")


if __name__ == "__main__":
    main()

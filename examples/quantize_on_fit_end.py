"""A trained network, quantized when its training ends: the engine that is fastest here, or none, and why."""

import argparse
import tempfile
import warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_speedkit import QuantizeOnFitEnd, load_quantized
from lightning_speedkit.demo.digits import load_digits, split_indices


def loader(split: str) -> DataLoader:
    images, labels = (torch.from_numpy(array[split_indices(split)]) for array in load_digits())
    return DataLoader(TensorDataset(images.float().flatten(1) / 16, labels.long()), 64, shuffle=split == "train")


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_acc", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 2e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fast", action="store_true", help="one epoch, and one engine")
    fast = parser.parse_args().fast
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        quantize = QuantizeOnFitEnd(
            backend="torch-ao-dynamic" if fast else None,
            objective="size" if fast else "latency",
            max_metric_drop=0.01,
            folder=folder,
        )
        trainer = Trainer(
            max_epochs=1 if fast else 5,
            callbacks=[quantize],
            **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
        )
        model = Classifier()
        trainer.fit(model, loader("train"), loader("val"))

        report = quantize.report
        print(report.describe())
        for candidate in report.candidates:
            took = "" if candidate.seconds_batch is None else f", {candidate.seconds_batch * 1e3:.2f} ms for a batch"
            print(f"  {candidate.backend}: {candidate.outcome}{took}. {candidate.reason}")
        print("written:", ", ".join(sorted(path.name for path in Path(folder).iterdir())))
        if report.kept:
            # a fresh process could; only a state_dict needs a model
            again = load_quantized(folder, Classifier())
            images = next(iter(loader("test")))[0]
            with torch.no_grad():
                alike = again(images).argmax(1) == model.eval()(images).argmax(1)
            print("answers alike:", bool(alike.float().mean() > 0.95))


if __name__ == "__main__":
    main()

"""A small network learns from a larger one, and then to live with int8: two callbacks in one run.

python examples/distill_and_round.py            # the digits that ship with the package
python examples/distill_and_round.py --fast     # fewer epochs
"""

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_speedkit.compress import quantize_model
from lightning_speedkit.compress.distill import Distillation
from lightning_speedkit.compress.quantize_aware import QuantizationAwareTraining
from lightning_speedkit.demo.digits import load_digits, split_indices


def loader(split: str) -> DataLoader:
    images, labels = (torch.from_numpy(array[split_indices(split)]) for array in load_digits())
    return DataLoader(TensorDataset(images.float().unsqueeze(1) / 16, labels.long()), 32, shuffle=split == "train")


class Classifier(LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        first = nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()
        second = nn.Conv2d(width, 2 * width, 3, 2, 1), nn.BatchNorm2d(2 * width), nn.ReLU()
        self.net = nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(32 * width, 10))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def trained(model: Classifier, epochs: int, *callbacks) -> Classifier:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = Trainer(max_epochs=epochs, callbacks=list(callbacks), enable_progress_bar=False, **quiet)
    trainer.fit(model, loader("train"))
    return model


def accuracy(net: nn.Module) -> float:
    with torch.no_grad():
        return torch.cat([net(x).argmax(dim=1) == y for x, y in loader("test")]).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fast", action="store_true", help="fewer epochs")
    epochs = 2 if parser.parse_args().fast else 10
    seed_everything(0, verbose=False)
    teacher = trained(Classifier(16), epochs).net
    alone = trained(Classifier(4), epochs).net
    aware = QuantizationAwareTraining(start=0.8)
    taught = trained(Classifier(4), epochs, Distillation(teacher, temperature=4.0), aware).net
    int8, details = quantize_model(taught, [x for x, _ in loader("train")][:8], backend="torch-ao-static")
    print(f"{len(aware.layers)} layers trained with rounding, {len(details.layers_quantized)} in int8")
    for name, net in {"teacher": teacher, "alone": alone, "taught": taught, "taught, int8": int8}.items():
        print(f"{name}: test accuracy {accuracy(net.eval()):.3f}")


if __name__ == "__main__":
    main()

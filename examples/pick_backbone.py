"""Which network for pictures of digits: candidates of torchvision measured on this machine, and one of them trained.

    python examples/pick_backbone.py            # twenty seconds of measuring, then two epochs
    python examples/pick_backbone.py --fast     # two candidates, a few batches
    python examples/pick_backbone.py --report backbones.html

It needs timm and torchvision: pip install 'lightning-speedkit[arch]'
"""

import argparse
import time

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_speedkit.architecture import pick_backbone, published_accuracies
from lightning_speedkit.demo.digits import load_digits, split_indices

SIZE, BATCH = 32, 32


def loader(split: str) -> DataLoader:
    images, labels = (torch.from_numpy(array[split_indices(split)]) for array in load_digits())
    images = nn.functional.interpolate(images.float().unsqueeze(1) / 16, size=(SIZE, SIZE), mode="bilinear")
    return DataLoader(TensorDataset(images, labels.long()), batch_size=BATCH, shuffle=split == "train")


class Classifier(LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        hits = self.net(batch[0]).argmax(1) == batch[1]
        self.log("accuracy", hits.float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3, fused=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fast", action="store_true", help="two candidates, a few batches")
    parser.add_argument("--report", help="write the table and its front as a page")
    arguments = parser.parse_args()
    families = ["mobilenet", "efficientnet", "regnet", "resnet"]
    names, seconds = (["torchvision:mobilenet_v3_small", "resnet"], 2) if arguments.fast else (families, 20)
    options = {"device": "cpu", "batch_size": BATCH, "seconds": seconds}
    table = pick_backbone((1, SIZE, SIZE), 10, {"max_parameters": 12e6}, names, **options)
    print(table)
    print("the cheapest:", table.best.name)
    # A hint at what each can learn, of other images; after a training of your own, put your own numbers here.
    hinted = table.with_accuracies(published_accuracies(table.names))
    print("not beaten in latency and ImageNet accuracy:", ", ".join(row.name for row in hinted.pareto))
    if arguments.report:
        print("report:", hinted.document().write_html(arguments.report))

    seed_everything(0, verbose=False)
    model = Classifier(table.best.build())
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    limits = (
        {"max_epochs": 1, "limit_train_batches": 4, "limit_val_batches": 2} if arguments.fast else {"max_epochs": 2}
    )
    trainer = Trainer(accelerator="cpu", enable_progress_bar=False, **limits, **quiet)
    start = time.perf_counter()
    trainer.fit(model, loader("train"), loader("val"))
    rate = trainer.global_step * BATCH / (time.perf_counter() - start)
    print(f"trained at {rate:.0f} samples/s, validation included; accuracy {trainer.callback_metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()

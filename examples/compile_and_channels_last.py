"""One small convolutional network, plain, channels-last, and compiled, and whether compiling paid in so short a run.

    python examples/compile_and_channels_last.py                 # inductor, which needs a C++ compiler on a CPU
    python examples/compile_and_channels_last.py --fast          # traced but not compiled, to see that it runs

The module logs in its step, its last batch is smaller than the others, and neither needs a change to it.
"""

import argparse
import time

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_speedkit import ChannelsLast, CompileModel
from lightning_speedkit.demo.digits import load_digits, split_indices


def loader() -> DataLoader:
    images, labels = (torch.from_numpy(array[split_indices("train")]) for array in load_digits())
    images = nn.functional.interpolate(images.float().unsqueeze(1) / 16, scale_factor=2)
    return DataLoader(TensorDataset(images, labels.long()), batch_size=64, shuffle=True)


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = []
        for before, after in ((1, 32), (32, 64), (64, 64)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.SiLU(), nn.AvgPool2d(2)]
        self.net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 10))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3, fused=True)


class Stopwatch(Callback):
    def on_train_start(self, trainer, pl_module):
        self.seconds = -time.perf_counter()

    def on_train_end(self, trainer, pl_module):
        self.seconds += time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fast", action="store_true", help="do not generate code, one epoch")
    fast = parser.parse_args().fast
    # max_shapes=1: the smaller last batch runs eagerly, and costs no second compilation
    compiling = CompileModel(backend="aot_eager" if fast else "inductor", max_shapes=1)
    runs = {"plain": [], "channels-last": [ChannelsLast()], "compiled": [compiling]}
    for name, callbacks in runs.items():
        seed_everything(0, verbose=False)
        watch = Stopwatch()
        quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
        trainer = Trainer(
            max_epochs=1 if fast else 8, callbacks=[watch, *callbacks], enable_progress_bar=False, **quiet
        )
        trainer.fit(Classifier(), loader())
        loss = trainer.callback_metrics["loss"]
        print(f"{name}: {trainer.global_step} steps in {watch.seconds:.1f} s, loss {loss:.3f}")
    print(compiling.report)


if __name__ == "__main__":
    main()

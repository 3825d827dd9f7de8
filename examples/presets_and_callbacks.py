"""Choose presets by name, add callbacks, and look at what the Trainer becomes.

    python examples/presets_and_callbacks.py            # a bundle for this machine, five epochs
    python examples/presets_and_callbacks.py --fast     # a few steps

A preset only adds arguments and callbacks to Lightning's Trainer; what you pass yourself wins.
"""

import argparse
import tempfile

import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_speedkit import AccumulationScheduler, QuantizeOnFitEnd, RunRecorder, presets, trainer_kwargs
from lightning_speedkit.demo.digits import load_digits, split_indices
from lightning_speedkit.demo.model import DigitNet
from lightning_speedkit.measure import read_hardware


def loader(split: str, batch_size: int = 32) -> DataLoader:
    images, labels = load_digits()
    indices = split_indices(split)
    pixels = torch.from_numpy(images[indices]).float().div(16).sub(0.3).unsqueeze(1)
    pixels = torch.nn.functional.interpolate(pixels, size=32, mode="bilinear")
    return DataLoader(
        TensorDataset(pixels, torch.from_numpy(labels[indices]).long()), batch_size, shuffle=split == "train"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fast", action="store_true", help="a few steps")
    fast = parser.parse_args().fast

    bundle = "cpu" if read_hardware().accelerator == "cpu" else "single-gpu"
    print(f"{bundle}: {presets.get(bundle).summary}")

    recorder = RunRecorder(warmup_steps=1)
    with tempfile.TemporaryDirectory() as folder:
        quantize = QuantizeOnFitEnd(folder=folder)
        trainer = Trainer(
            **trainer_kwargs(
                bundle,
                max_epochs=1 if fast else 5,
                limit_train_batches=8 if fast else None,
                gradient_clip_val=1.0,  # any argument of the Trainer; yours win over the preset's
                callbacks=[AccumulationScheduler({0: 1, 1: 2}), recorder, quantize],
                logger=False,
                enable_checkpointing=False,
                default_root_dir=folder,
            )
        )
        model = DigitNet()
        trainer.fit(model, loader("train"), loader("val"))
        trainer.test(model, loader("test"))
    print(recorder.run.train.describe())
    print(quantize.report.describe())
    if quantize.quantized_model is not None:
        images, labels = next(iter(loader("test", batch_size=400)))
        right = (quantize.quantized_model(images).argmax(dim=1) == labels).float().mean()
        print(f"int8 test accuracy {right:.4f}")


if __name__ == "__main__":
    main()

"""A trained network made lighter, and its accuracy brought back with the old network as the teacher.

python examples/lighten_and_distill.py            # the digits that ship with the package
python examples/lighten_and_distill.py --fast     # fewer epochs
"""

import argparse
import warnings

import torch
from lightning.pytorch import Trainer, seed_everything
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, TensorDataset

from lightning_speedkit.architecture import apply_plan, lighten
from lightning_speedkit.compress.distill import Distillation
from lightning_speedkit.demo.digits import load_digits, split_indices
from lightning_speedkit.demo.model import DigitNet


def loader(split: str) -> DataLoader:
    images, labels = (torch.from_numpy(array[split_indices(split)]) for array in load_digits())
    images = interpolate(images[:, None].float() / 16, size=32, mode="bilinear")
    return DataLoader(TensorDataset(images, labels.long()), 64, shuffle=split == "train")


def trainer(epochs: int, callbacks: list | None = None) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    quiet |= {"enable_progress_bar": False, "accelerator": "cpu", "max_epochs": epochs}
    return Trainer(callbacks=callbacks or [], **quiet)


def accuracy(model: DigitNet) -> float:
    return trainer(1).test(model, loader("test"), verbose=False)[0]["test_acc"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fast", action="store_true", help="fewer epochs")
    epochs = 3 if parser.parse_args().fast else 8
    warnings.simplefilter("ignore")
    seed_everything(0)

    teacher = DigitNet()
    trainer(epochs).fit(teacher, loader("train"))
    example = next(iter(loader("test")))[0]
    light, report = lighten(teacher, example, ratio=0.25, skip=["layers.6"])
    print(report)
    print(f"accuracy: {accuracy(teacher):.3f} before, {accuracy(light):.3f} at once", end="")
    trainer(2, [Distillation(teacher, temperature=4.0, weight=0.5)]).fit(light, loader("train"))
    print(f", {accuracy(light):.3f} after 2 epochs with the old network as teacher")

    again = apply_plan(DigitNet(), report.plan, warm_start=False)  # the plan is plain data; keep it with the weights
    again.load_state_dict(light.state_dict())
    print("the weights load into a network built from the plan")


if __name__ == "__main__":
    main()

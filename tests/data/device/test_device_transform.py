"""DeviceTransform: what runs when, on which part of the batch, with which numbers, and what it refuses."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_speedkit.data.device.batch_random import batch_generator, training_seed
from lightning_speedkit.data.device.device_augment import RandomCrop, RandomErase, RandomFlip
from lightning_speedkit.data.device.device_mix import CutMix, MixUp
from lightning_speedkit.data.device.device_normalize import Normalize
from lightning_speedkit.data.device.device_operation import ImageOperation
from lightning_speedkit.data.device.device_transform import DeviceTransform
from lightning_speedkit.errors import LoaderError
from tests.data.device.test_device_augment import FORMATS, pixels

LABELS = torch.tensor([0, 1, 2, 3, 1, 0])
SEED = (7, 1, 2, 0)


class Pair(NamedTuple):
    image: Any
    label: Any


def everything() -> DeviceTransform:
    train = [RandomCrop((7, 9), 2), RandomFlip(), RandomErase(), MixUp(classes=4), CutMix(classes=4)]
    return DeviceTransform(train, [Normalize(0.4, 0.3)])


def changed(transform: DeviceTransform, images: torch.Tensor, seed: Any = SEED, training: bool = True) -> torch.Tensor:
    result = transform((images, LABELS), training=training, seed=seed)[0]
    assert isinstance(result, torch.Tensor)
    return result


def test_training_runs_both_lists_in_order_and_evaluation_the_second_alone() -> None:
    transform, images = everything(), pixels()
    expected, soft = images, LABELS
    for position, operation in enumerate(transform.train):  # by hand, each with the generator of its position
        generator = batch_generator((*SEED, position))
        if isinstance(operation, ImageOperation):
            expected = operation(expected, generator)
        else:
            expected, soft = operation(expected, soft, generator)  # type: ignore[operator]
    result = transform((images, LABELS), training=True, seed=SEED)
    assert torch.equal(result[0], Normalize(0.4, 0.3)(expected))
    assert torch.equal(result[1], soft)
    evaluated = transform((images, LABELS), training=False, seed=SEED)
    assert torch.equal(evaluated[0], Normalize(0.4, 0.3)(images))
    assert evaluated[1] is LABELS


@pytest.mark.parametrize("memory_format", FORMATS)
def test_the_memory_format_is_kept_through_all(memory_format: torch.memory_format) -> None:
    images = pixels(memory_format=memory_format)
    before = images.clone()
    result = changed(everything(), images)
    assert result.is_contiguous(memory_format=memory_format)
    assert result.dtype == torch.float32
    assert torch.equal(images, before)
    assert torch.equal(result, changed(everything(), pixels()))  # and it does not change the values


def test_the_seed_alone_decides() -> None:
    images, transform = pixels(), everything()
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    first = changed(transform, images)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == state[1:]  # type: ignore[index]
    torch.rand(5)
    assert torch.equal(changed(everything(), images, list(SEED)), first)
    for other in ((8, 1, 2, 0), (7, 2, 2, 0), (7, 1, 3, 0), (7, 1, 2, 1)):
        assert not torch.equal(changed(transform, images, other), first)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_has_no_say(dtype: torch.dtype) -> None:
    expected = everything()((pixels(), LABELS), training=True, seed=SEED)
    torch.set_default_dtype(dtype)
    result = everything()((pixels(), LABELS), training=True, seed=SEED)
    torch.set_default_dtype(torch.float32)
    for new, old in zip(result, expected, strict=True):
        assert new.dtype == torch.float32
        assert torch.equal(new, old)


def test_equal_operations_draw_different_numbers() -> None:
    # two fair flips restore half of the images; with one and the same draw they would restore all
    images = pixels().repeat(20, 1, 1, 1)
    transform = DeviceTransform([RandomFlip(), RandomFlip()])
    twice = transform((images,), training=True, seed=SEED)[0]
    same = (twice == images).flatten(1).all(dim=1)
    assert 30 < int(same.sum()) < 90


@pytest.mark.parametrize(
    ("batch", "image", "label"),
    [
        ((pixels(), LABELS), 0, 1),
        ([pixels(), LABELS], 0, 1),
        ((LABELS, "names", pixels()), -1, 0),
        ({"image": pixels(), "label": LABELS, "name": ["a"]}, "image", "label"),
        (Pair(pixels(), LABELS), "image", "label"),
        ({"views": [pixels(), None], "target": (LABELS, 3)}, ["views", 0], ["target", 0]),
    ],
)
def test_images_and_labels_may_be_anywhere(batch: Any, image: Any, label: Any) -> None:
    mixing = DeviceTransform([RandomFlip(), MixUp(classes=4)], [Normalize()], image=image, label=label)
    plain = DeviceTransform([RandomFlip(), MixUp(classes=4)], [Normalize()])
    expected = plain((pixels(), LABELS), training=True, seed=SEED)
    result = mixing(batch, training=True, seed=SEED)
    assert type(result) is type(batch)
    for place, value in ((image, expected[0]), (label, expected[1])):
        found = result
        for key in place if isinstance(place, list) else [place]:
            found = getattr(found, key) if isinstance(found, Pair) else found[key]
        assert torch.equal(found, value)
    evaluated = mixing(batch, training=False, seed=SEED)
    assert type(evaluated) is type(batch)


def test_a_batch_that_is_the_images() -> None:
    transform = DeviceTransform([RandomFlip(1.0)], [Normalize()], image=None)
    assert torch.equal(transform(pixels(), training=True, seed=SEED), pixels().flip(3) / 255)


def test_nothing_to_do_gives_the_batch_itself() -> None:
    batch = (pixels(), LABELS)
    assert DeviceTransform()(batch, training=True, seed=SEED) is batch
    assert DeviceTransform([RandomFlip()])(batch, training=False, seed=SEED) is batch
    odd = "neither images nor labels"
    assert DeviceTransform([RandomFlip()])(odd, training=False, seed=SEED) is odd


def test_labels_are_not_looked_for_unless_they_are_mixed() -> None:
    transform = DeviceTransform([RandomFlip()], [Normalize()])
    assert len(transform((pixels(),), training=True, seed=SEED)) == 1
    mixing = DeviceTransform([MixUp(classes=4)], [Normalize()])
    assert len(mixing((pixels(),), training=False, seed=SEED)) == 1
    with pytest.raises(ValueError, match=r"label leads to batch\[1\], but batch is a tuple of 1 elements"):
        mixing((pixels(),), training=True, seed=SEED)


@pytest.mark.parametrize(
    ("batch", "error", "words"),
    [
        (("text", LABELS), TypeError, "batch[0] is a str"),
        ((torch.zeros(6, 3), LABELS), ValueError, "batch[0] has the shape (6, 3)"),
        ((LABELS, pixels()), ValueError, "batch[0] has the shape (6,)"),
        ((pixels().long(), LABELS), TypeError, "batch[0] is torch.int64"),
        ({"x": pixels()}, ValueError, "batch has the keys 'x'"),
        (pixels(), ValueError, "batch is a Tensor. None stands for the batch itself"),
    ],
)
@pytest.mark.parametrize("operation", [Normalize(), RandomFlip()])
def test_a_batch_without_images(batch: Any, error: type[Exception], words: str, operation: Any) -> None:
    with pytest.raises(error) as caught:
        DeviceTransform([operation])(batch, training=True, seed=SEED)
    assert words in str(caught.value)


def test_labels_that_cannot_be_mixed() -> None:
    transform = DeviceTransform([MixUp(classes=4)], label="y", image="x")
    with pytest.raises(TypeError, match=r"batch\['y'\] is a list"):
        transform({"x": pixels(), "y": [0, 1]}, training=True, seed=SEED)
    with pytest.raises(ValueError, match="labels holds 0 to 9"):
        transform({"x": pixels(), "y": LABELS * 3}, training=True, seed=SEED)


class AsModule(nn.Module):
    """An operation that knows the global random state only, as other libraries' do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.0))
        self.drawn: list[tuple[float, float, float]] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
        return images.float() * self.scale * self.drawn[-1][2]


def test_operations_of_others_are_seeded_and_leave_no_trace() -> None:
    module = AsModule()
    transform = DeviceTransform([module])
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    first = changed(transform, pixels())
    assert torch.equal(torch.get_rng_state(), state[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == state[1:]  # type: ignore[index]
    (torch.rand(3), random.random(), np.random.rand())
    assert torch.equal(changed(transform, pixels()), first)
    changed(transform, pixels(), (0,))
    assert module.drawn[0] == module.drawn[1]
    assert all(a != b for a, b in zip(module.drawn[1], module.drawn[2], strict=True))


def test_any_callable_is_an_operation_and_its_memory_format_is_restored() -> None:
    images = pixels(memory_format=torch.channels_last)
    result = changed(DeviceTransform([lambda x: x.float().contiguous() * 2]), images)
    assert torch.equal(result, images.float() * 2)
    assert result.is_contiguous(memory_format=torch.channels_last)


def test_a_module_is_moved_to_the_batch_and_only_then() -> None:
    module = AsModule()
    scale, transform = module.scale, DeviceTransform([module])
    changed(transform, pixels())
    assert module.scale is scale
    result = transform((pixels().to("meta"),), training=True, seed=SEED)[0]
    assert result.device.type == module.scale.device.type == "meta"
    assert module.training


def test_an_operation_that_fails_is_named() -> None:
    with pytest.raises(LoaderError) as caught:
        changed(DeviceTransform([nn.Linear(3, 4)]), pixels())
    text = str(caught.value)
    assert "Linear(in_features=3, out_features=4, bias=True) failed on batch[0], torch.uint8" in text
    assert "put Normalize() before it" in text
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_running_out_of_memory_stays_what_it_is() -> None:
    def full(images: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        changed(DeviceTransform([full]), pixels())


@pytest.mark.parametrize(
    ("operation", "words"),
    [
        (lambda images: None, "returned a NoneType, not images"),
        (lambda images: (images, 1), "returned a tuple, not images"),
        (lambda images: images[:2], "returned the shape (2, 3, 7, 9): another batch"),
        (lambda images: images.float().mean(), "another batch"),
    ],
)
def test_what_an_operation_returns_is_looked_at(operation: Any, words: str) -> None:
    with pytest.raises(LoaderError) as caught:
        changed(DeviceTransform([operation]), pixels())
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"always": [RandomFlip()]}, ValueError, "always holds RandomFlip"),
        ({"always": [RandomCrop(4)]}, ValueError, "which is random: put it into train"),
        ({"always": [RandomErase()]}, ValueError, "put it into train"),
        ({"always": [MixUp(classes=3)]}, ValueError, "put it into train"),
        ({"always": [CutMix(classes=3)]}, ValueError, "put it into train"),
        ({"train": RandomFlip()}, TypeError, "train must be a list of operations, got a RandomFlip"),
        ({"train": nn.Sequential()}, TypeError, "train must be a list of operations, got a Sequential"),
        ({"train": "flip"}, TypeError, "train must be a list"),
        ({"train": ["flip"]}, TypeError, "train must hold operations that can be called"),
        ({"train": [RandomFlip]}, TypeError, "train holds the class RandomFlip: write RandomFlip"),
        ({"image": 1.5}, TypeError, "image must be an int"),
        ({"train": [MixUp(classes=3)], "image": "x", "label": "x"}, ValueError, "image and label are both 'x'"),
    ],
)
def test_arguments_that_are_wrong(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        DeviceTransform(**arguments)


def test_the_given_lists_are_copied_and_it_is_printed_and_pickled() -> None:
    train = [RandomFlip()]
    transform = DeviceTransform(train, [Normalize()], image=["a", 0], label=None)
    train.clear()
    assert len(transform.train) == 1
    shown = repr(transform)
    assert "RandomFlip(probability=0.5, direction='horizontal')" in shown
    assert shown.endswith("image=['a', 0], label=None)")
    namespace: dict[str, Any] = {}
    exec(f"from {__name__} import *\ncopy = {shown}", namespace)
    assert repr(namespace["copy"]) == shown
    assert repr(pickle.loads(pickle.dumps(transform))) == shown
    assert repr(DeviceTransform()) == "DeviceTransform(train=[], always=[])"


def test_it_is_made_from_yaml() -> None:
    jsonargparse = pytest.importorskip("jsonargparse")
    package = "lightning_speedkit.data"
    text = f"""
    transform:
      train:
      - class_path: {package}.RandomCrop
        init_args: {{size: [7, 9], padding: 2}}
      - class_path: {package}.RandomErase
        init_args: {{area: [0.1, 0.2]}}
      - class_path: torch.nn.Identity
      - class_path: {package}.MixUp
        init_args: {{classes: 4, alpha: 0.2}}
      always:
      - class_path: {package}.Normalize
        init_args: {{mean: [0.4, 0.5, 0.6], std: 0.3}}
      image: [views, 0]
      label: label
    """
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(DeviceTransform, "transform")
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
    made = instantiate(parser.parse_object(yaml.safe_load(text))).transform
    train = [RandomCrop((7, 9), 2), RandomErase(area=(0.1, 0.2)), nn.Identity(), MixUp(classes=4, alpha=0.2)]
    by_hand = DeviceTransform(train, [Normalize((0.4, 0.5, 0.6), 0.3)], image=["views", 0], label="label")
    assert repr(made) == repr(by_hand)


class Pictures(LightningDataModule):
    """A DataModule that calls the transform as SpeedkitDataModule does."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = everything()
        self.train: list[torch.Tensor] = []
        self.val: list[torch.Tensor] = []

    def train_dataloader(self) -> Any:
        return ResumableLoader(TensorDataset(pixels(), LABELS), batch_size=1)

    val_dataloader = train_dataloader

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert self.trainer is not None
        training = self.trainer.training
        batch = self.transform(batch, training=training, seed=training_seed(self.trainer, 3))
        (self.train if training else self.val).append(batch[0])
        return batch


class ResumableLoader(DataLoader[Any]):
    """Counts the batches, and goes on after those of a state that was loaded."""

    done = start = 0

    def __iter__(self) -> Any:
        skipped, self.start = self.start, 0
        for i, batch in enumerate(super().__iter__()):
            if i >= skipped:
                self.done = i + 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["done"] % len(self)


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(7 * 9 * 3, 4))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert batch[1].dtype == torch.int64

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_resumed_run_augments_as_the_unbroken_one(tmp_path: Path) -> None:
    def fit(ckpt_path: Path | None = None) -> tuple[Pictures, Classifier]:
        torch.manual_seed(99 if ckpt_path else 1)
        data, model = Pictures(), Classifier()
        saved = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
        trainer = Trainer(
            max_epochs=2,
            accelerator="cpu",
            callbacks=[] if ckpt_path else [saved],
            enable_checkpointing=ckpt_path is None,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            val_check_interval=4,
        )
        trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)
        return data, model

    whole, model = fit()
    assert len(whole.train) == 12
    assert len({images.numpy().tobytes() for images in whole.train}) == 12
    expected = Normalize(0.4, 0.3)(pixels())
    assert len(whole.val) == 2 + 6 + 6  # of the sanity check, and once in each epoch
    assert all(torch.equal(images[0], expected[i % 6]) for i, images in enumerate(whole.val[2:]))
    for steps in (2, 4, 6, 9):
        resumed, again = fit(tmp_path / f"step={steps}.ckpt")
        assert len(resumed.train) == 12 - steps
        assert all(torch.equal(a, b) for a, b in zip(resumed.train, whole.train[steps:], strict=True))
        assert torch.equal(again.net[1].weight, model.net[1].weight)


@pytest.mark.gpu
@pytest.mark.parametrize("memory_format", FORMATS)
def test_on_a_gpu_it_draws_there_and_gives_what_the_parameters_say(memory_format: torch.memory_format) -> None:
    images = pixels(memory_format=memory_format).cuda()
    batch = images, LABELS.cuda()
    first, again = (everything()(batch, training=True, seed=SEED) for _ in range(2))
    assert first[0].is_cuda
    assert first[0].is_contiguous(memory_format=memory_format)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    flip = RandomFlip()
    flipped = flip.draw(images, batch_generator((*SEED, 0), images.device))
    result = DeviceTransform([flip])(batch, training=True, seed=SEED)[0]
    for image, turned, was in zip(result, flipped, images, strict=True):
        assert torch.equal(image, was.flip(2) if turned else was)

"""Modules of kornia and torchvision.transforms.v2 in DeviceTransform, as they are; skipped where they are missing."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from lightning_speedkit.data.device.device_augment import RandomFlip
from lightning_speedkit.data.device.device_normalize import Normalize
from lightning_speedkit.data.device.device_transform import DeviceTransform
from lightning_speedkit.errors import LoaderError
from tests.data.device.test_device_augment import FORMATS, pixels

LABELS = torch.tensor([0, 1, 2, 3, 1, 0])
SEED = (1, 2, 3, 0)


def kornia_operations() -> list[Any]:
    augmentation = pytest.importorskip("kornia.augmentation")
    return [
        augmentation.RandomHorizontalFlip(p=0.5),
        augmentation.ColorJiggle(0.2, 0.2, 0.2, 0.1, p=1.0),
        augmentation.RandomAffine(20.0, p=1.0),
        augmentation.RandomErasing(p=1.0),
        augmentation.AugmentationSequential(augmentation.RandomVerticalFlip(p=0.5), data_keys=["input"]),
    ]


def torchvision_operations() -> list[Any]:
    v2 = pytest.importorskip("torchvision.transforms.v2")
    return [
        v2.RandomHorizontalFlip(p=0.5),
        v2.RandomResizedCrop((7, 9), antialias=True),
        v2.ColorJitter(0.3, 0.3),
        v2.RandAugment(),
        v2.RandomErasing(p=1.0),
    ]


OPERATIONS = [(kornia_operations, i) for i in range(5)] + [(torchvision_operations, i) for i in range(5)]


def states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize(("make", "number"), OPERATIONS)
def test_a_module_is_seeded_contained_and_keeps_the_memory_format(
    make: Any, number: int, memory_format: torch.memory_format
) -> None:
    operation = make()[number]
    images = pixels(memory_format=memory_format)
    transform = DeviceTransform([Normalize(), operation] if make is kornia_operations else [operation], [Normalize()])
    before = states()
    first = transform((images, LABELS), training=True, seed=SEED)
    assert states() == before
    assert first[0].shape == images.shape
    assert first[0].dtype == torch.float32
    assert first[0].is_contiguous(memory_format=memory_format)
    assert first[1] is LABELS
    torch.rand(7)
    fresh = make()[number]  # not the state of the module decides either
    transform = DeviceTransform([Normalize(), fresh] if make is kornia_operations else [fresh], [Normalize()])
    assert torch.equal(transform((images, LABELS), training=True, seed=SEED)[0], first[0])
    others = [transform((images, LABELS), training=True, seed=(seed,))[0] for seed in range(8)]
    assert any(not torch.equal(other, first[0]) for other in others)
    evaluated = transform((images, LABELS), training=False, seed=SEED)[0]
    assert torch.equal(evaluated, images / 255)


def test_kornia_flips_each_sample_by_itself_and_equals_the_kits_own_result() -> None:
    augmentation = pytest.importorskip("kornia.augmentation")
    images = pixels().repeat(4, 1, 1, 1)
    result = DeviceTransform([Normalize(), augmentation.RandomHorizontalFlip(p=0.5)])(
        (images,), training=True, seed=SEED
    )[0]
    flipped = [not torch.equal(new, old / 255) for new, old in zip(result, images, strict=True)]
    assert 0 < sum(flipped) < 24
    expected = DeviceTransform([RandomFlip(1.0), Normalize()])((images,), training=True, seed=SEED)[0]
    for i, turned in enumerate(flipped):
        assert torch.equal(result[i], expected[i] if turned else images[i] / 255)


def test_kornia_on_uint8_says_what_to_do() -> None:
    augmentation = pytest.importorskip("kornia.augmentation")
    with pytest.raises(LoaderError, match=r"batch\[0\], torch.uint8 .* put Normalize\(\) before it"):
        DeviceTransform([augmentation.RandomHorizontalFlip(p=1.0)])((pixels(),), training=True, seed=SEED)


def test_torchvision_normalize_is_that_of_the_kit() -> None:
    v2 = pytest.importorskip("torchvision.transforms.v2")
    theirs = DeviceTransform(always=[v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.4] * 3, [0.3] * 3)])
    ours = DeviceTransform(always=[Normalize(0.4, 0.3)])
    one, other = (transform((pixels(),), training=False, seed=SEED)[0] for transform in (theirs, ours))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["MixUp", "CutMix"])
def test_torchvision_mixes_get_the_labels_too(name: str) -> None:
    v2 = pytest.importorskip("torchvision.transforms.v2")
    mix = getattr(v2, name)(num_classes=4)
    transform = DeviceTransform([Normalize(), mix], image="x", label="y")
    first, again = (transform({"x": pixels(), "y": LABELS}, training=True, seed=SEED) for _ in range(2))
    assert first["y"].shape == (6, 4)
    torch.testing.assert_close(first["y"].sum(dim=1), torch.ones(6))
    assert torch.equal(first["x"], again["x"])
    assert torch.equal(first["y"], again["y"])
    with pytest.raises(ValueError, match="which is random: put it into train"):
        DeviceTransform(always=[mix])

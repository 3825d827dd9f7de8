"""MixUp and CutMix: against a loop over the samples, and label weights equal to what the pixels say."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch.nn import functional

from lightning_speedkit.data.device.device_mix import (
    CutMix,
    MixUp,
    cut_images,
    draw_beta,
    mix_images,
    mix_labels,
    soft_labels,
)
from tests.data.device.test_device_augment import DTYPES, FORMATS, many, pixels, seeded


def shades(count: int, height: int = 8, width: int = 6) -> torch.Tensor:
    """Each image has one shade of its own: what share of a mixed image is whose can be read off its pixels."""
    return torch.linspace(0.1, 0.9, count).reshape(count, 1, 1, 1).expand(count, 2, height, width)


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_mixup_is_that_of_a_loop(dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    images, labels = pixels(dtype=dtype, memory_format=memory_format), torch.tensor([0, 1, 2, 3, 1, 0])
    operation = MixUp(classes=4, alpha=1.0)
    partners, weights = operation.draw(images, seeded(1))
    mixed, soft = operation(images, labels, seeded(1))
    assert mixed.dtype == (torch.float32 if dtype == torch.uint8 else dtype)
    assert mixed.is_contiguous(memory_format=memory_format)
    assert sorted(partners.tolist()) == list(range(6))
    values = images.double() / (255 if dtype == torch.uint8 else 1)
    for i in range(6):
        partner, weight = int(partners[i]), float(weights[i])
        expected = weight * values[i] + (1 - weight) * values[partner]
        torch.testing.assert_close(mixed[i].double(), expected, rtol=0, atol=2e-3 if dtype == torch.bfloat16 else 1e-6)
        row = [0.0] * 4
        row[labels[i]] += weight
        row[labels[partner]] += 1 - weight
        assert soft[i].tolist() == pytest.approx(row, abs=1e-6)


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_cutmix_is_that_of_a_loop(dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    images, labels = pixels(dtype=dtype, memory_format=memory_format), torch.tensor([0, 1, 2, 3, 1, 0])
    operation, generator = CutMix(classes=4), seeded(2)
    partners, weights = operation.draw(images, generator)
    boxes = operation.draw_boxes(images, weights, generator)
    mixed, soft = operation(images, labels, seeded(2))
    assert mixed.dtype == dtype
    assert mixed.is_contiguous(memory_format=memory_format)
    for i, (top, left, height, width) in enumerate(boxes.tolist()):
        partner, expected = int(partners[i]), images[i].clone()
        expected[:, top : top + height, left : left + width] = images[
            partner, :, top : top + height, left : left + width
        ]
        assert torch.equal(mixed[i], expected)
        row = [0.0] * 4
        row[labels[i]] += 1 - height * width / (7 * 9)
        row[labels[partner]] += height * width / (7 * 9)
        assert soft[i].tolist() == pytest.approx(row, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 9), st.floats(0.05, 4.0), st.integers(0, 10_000), st.sampled_from([MixUp, CutMix]), st.floats(0, 1)
)
def test_label_weights_equal_the_share_of_the_pixels(
    count: int, alpha: float, seed: int, kind: Any, probability: float
) -> None:
    images = shades(count)
    operation = kind(classes=max(count, 2), alpha=alpha, probability=probability)
    mixed, soft = operation(images, torch.arange(count), seeded(seed))
    assert bool((soft >= 0).all())
    torch.testing.assert_close(soft.sum(dim=1), torch.ones(count))
    # the class of a sample is its number, so the labels say which mean shade the mixed image must have
    torch.testing.assert_close(mixed.mean(dim=(1, 2, 3)), soft[:, :count] @ images[:, 0, 0, 0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("alpha", [0.05, 0.2, 0.5, 1.0, 2.5, 8.0])
def test_the_weights_are_from_the_beta_distribution(alpha: float) -> None:
    drawn = draw_beta(alpha, 20_000, seeded(3), "cpu")
    assert drawn.shape == (20_000,)
    assert drawn.dtype == torch.float32
    assert bool(((drawn >= 0) & (drawn <= 1)).all())  # not NaN either
    inner = drawn[(drawn > 1e-6) & (drawn < 1 - 1e-6)].double()  # float32 has few numbers close to 1
    low, high = stats.beta(alpha, alpha).cdf([1e-6, 1 - 1e-6])
    assert abs(len(inner) / 20_000 - (high - low)) < 5 * math.sqrt(0.25 / 20_000)
    truncated = (stats.beta(alpha, alpha).cdf(inner) - low) / (high - low)
    assert stats.kstest(truncated, stats.uniform().cdf).pvalue > 0.001


def test_a_mean_and_a_deviation_known_by_hand() -> None:
    drawn = draw_beta(0.5, 100_000, seeded(0), "cpu").double()
    assert drawn.mean().item() == pytest.approx(0.5, abs=0.006)
    assert drawn.var().item() == pytest.approx(1 / (4 * (2 * 0.5 + 1)), abs=0.002)  # 1/8


def test_the_boxes_of_cutmix_have_the_drawn_share_around_a_uniform_centre() -> None:
    weights = torch.full((20_000,), 0.75)
    boxes = CutMix(classes=2).draw_boxes(many(20_000, 100, 60), weights, seeded(5))
    top, left, height, width = boxes.unbind(1)
    assert int(height.max()) == 50  # the root of a quarter, of each side
    assert int(width.max()) == 30
    inside = (height == 50) & (width == 30)
    assert abs(inside.double().mean().item() - 0.51 * 31 / 60) < 0.02  # centres 25 to 75 of 100, 15 to 45 of 60
    centres = torch.where(top > 0, top + 25, top + height - 25)
    assert stats.kstest((centres + 0.5) / 100, stats.uniform().cdf).pvalue > 0.001
    assert int(boxes.min()) >= 0
    assert int((left + width).max()) == 60


@pytest.mark.parametrize("kind", [MixUp, CutMix])
def test_how_often_is_mixed(kind: Any) -> None:
    operation = kind(classes=2, alpha=1.0, probability=0.25)
    _, weights = operation.draw(many(20_000, 4, 4), seeded(1))
    assert abs(int((weights < 1).sum()) - 5000) < 5 * math.sqrt(20_000 * 0.25 * 0.75)
    images, labels = pixels(), torch.tensor([0, 1, 0, 1, 0, 1])
    same, soft = kind(classes=2, probability=0.0)(images, labels, seeded(1))
    assert torch.equal(same, images / 255 if kind is MixUp else images)
    assert torch.equal(soft, functional.one_hot(labels, 2).float())


def test_partners_are_a_random_order() -> None:
    orders = {tuple(MixUp(classes=2).draw(many(3, 1, 1), seeded(seed))[0].tolist()) for seed in range(60)}
    assert len(orders) == 6


def test_weights_of_zero_and_one_are_exact() -> None:
    images, partners = pixels(2, dtype=torch.float32), torch.tensor([1, 0])
    assert torch.equal(mix_images(images, partners, torch.tensor([1.0, 0.0])), images[[0, 0]])
    assert torch.equal(mix_labels(torch.eye(2), partners, torch.tensor([1.0, 0.0])), torch.eye(2)[[0, 0]])
    full = torch.tensor([[0, 0, 7, 9], [3, 3, 0, 0]])
    mixed, kept = cut_images(images, partners, full)
    assert torch.equal(mixed, images[[1, 1]])
    assert kept.tolist() == [0.0, 1.0]


def test_cross_entropy_of_the_labels_is_the_mixed_loss() -> None:
    images, labels = pixels(6), torch.tensor([0, 1, 2, 3, 1, 0])
    operation = MixUp(classes=4, alpha=1.0)
    partners, weights = operation.draw(images, seeded(9))
    _, soft = operation(images, labels, seeded(9))
    logits = torch.randn(6, 4, generator=seeded(8))
    own = functional.cross_entropy(logits, labels, reduction="none")
    other = functional.cross_entropy(logits, labels[partners], reduction="none")
    expected = (weights * own + (1 - weights) * other).mean()
    torch.testing.assert_close(functional.cross_entropy(logits, soft), expected)
    for dtype in (torch.bfloat16, torch.float16):
        assert functional.cross_entropy(logits.to(dtype), soft).isfinite()


def test_one_after_the_other() -> None:
    images, labels = MixUp(classes=6)(shades(6), torch.arange(6), seeded(0))
    mixed, soft = CutMix(classes=6)(images, labels, seeded(1))
    torch.testing.assert_close(mixed.mean(dim=(1, 2, 3)), soft @ shades(6)[:, 0, 0, 0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", [MixUp, CutMix])
def test_input_and_global_state_are_left_alone(kind: Any) -> None:
    images, labels = pixels(), torch.tensor([0, 1, 0, 1, 0, 1])
    before = images.clone(), labels.clone(), torch.get_rng_state()
    first = kind(classes=2)(images, labels, seeded(3))
    assert torch.equal(torch.get_rng_state(), before[2])
    again = kind(classes=2)(images, labels, seeded(3))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert torch.equal(images, before[0])
    assert torch.equal(labels, before[1])


def test_labels_of_every_integer_type_and_probabilities() -> None:
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        assert torch.equal(soft_labels(torch.tensor([2, 0], dtype=dtype), 3), torch.eye(3)[[2, 0]])
    assert torch.equal(soft_labels(torch.eye(3).half(), 3), torch.eye(3))
    assert soft_labels(torch.zeros(0, dtype=torch.int64), 3).shape == (0, 3)


@pytest.mark.parametrize(
    ("labels", "error", "words"),
    [
        (torch.tensor([0, 3]), ValueError, "batch[1] holds 0 to 3: with classes=3 they are from 0 to 2"),
        (torch.tensor([-1, 0]), ValueError, "holds -1 to 0"),
        (torch.zeros(2, 2), TypeError, "or probabilities (batch, 3)"),
        (torch.zeros(2), TypeError, "batch[1] is torch.float32 of shape (2,)"),
        (torch.tensor([True, False]), TypeError, "batch[1] is torch.bool"),
        (torch.zeros(2, 1, dtype=torch.int64), ValueError, "batch[1] has the shape (2, 1)"),
        ([0, 1], TypeError, "batch[1] is a list"),
    ],
)
def test_labels_that_are_none(labels: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        soft_labels(labels, 3, "batch[1]")
    assert words in str(caught.value)


@pytest.mark.parametrize("kind", [MixUp, CutMix])
def test_arguments_that_are_wrong(kind: Any) -> None:
    for arguments, error, words in (
        ({"classes": 1}, ValueError, "classes must be at least 2"),
        ({"classes": 3.0}, TypeError, "classes must be an int"),
        ({"classes": True}, TypeError, "classes must be an int"),
        ({"classes": 3, "alpha": 0.0}, ValueError, "alpha must be finite, above 0"),
        ({"classes": 3, "probability": 2}, ValueError, "probability must be"),
    ):
        with pytest.raises(error, match=words):
            kind(**arguments)
    with pytest.raises(ValueError, match="6 images and 2 labels"):
        kind(classes=3)(pixels(), torch.tensor([0, 1]))

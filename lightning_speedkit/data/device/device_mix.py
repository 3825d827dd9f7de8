"""MixUp and CutMix, a whole batch at a time, each sample with its own weight and partner.

What they do: each sample is mixed with another of its batch, and its label with that one's, by the same share. The
labels come out as probabilities, ``(batch, classes)`` float32, which ``torch.nn.functional.cross_entropy`` takes as
they are.
When it helps: classifiers that overfit.
What it costs: a shuffled copy of the batch and one pass over it. The training loss is no longer that of the plain
labels, and an accuracy on training batches needs ``labels.argmax(dim=1)``.

Source: Zhang et al., mixup: Beyond Empirical Risk Minimization, 2018; Yun et al., CutMix, 2019; for the draws,
Marsaglia and Tsang, A Simple Method for Generating Gamma Variables, 2000.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from lightning_speedkit.data.argument_checks import a_type, checked_integer
from lightning_speedkit.data.device.device_augment import boxes_as_mask
from lightning_speedkit.data.device.device_operation import (
    LabelOperation,
    check_images,
    checked_number,
    draw_chosen,
    is_channels_last,
)

__all__ = ["CutMix", "MixUp", "cut_images", "draw_beta", "mix_images", "mix_labels", "soft_labels"]

_TRIES = 8


def soft_labels(labels: Tensor, classes: int, place: str = "labels") -> Tensor:
    """Labels as probabilities, ``(batch, classes)`` float32, from integers ``(batch,)`` or from probabilities.

    Raises:
        TypeError: They are neither integers nor floats.
        ValueError: They have another shape, or a label on the CPU is not below ``classes``. On a CUDA device such a
            label is a device-side assertion, because looking at values would wait for the device.

    >>> soft_labels(torch.tensor([1, 0]), 3)
    tensor([[0., 1., 0.],
            [1., 0., 0.]])
    """
    if not isinstance(labels, Tensor):
        raise TypeError(f"{place} is {a_type(labels)}: labels are a tensor of integers (batch,).")
    if labels.is_floating_point() and labels.ndim == 2 and labels.shape[1] == classes:
        return labels.float()
    if labels.dtype == torch.bool or labels.is_floating_point() or labels.is_complex():
        raise TypeError(
            f"{place} is {labels.dtype} of shape {tuple(labels.shape)}: labels are integers (batch,), or probabilities "
            f"(batch, {classes})."
        )
    if labels.ndim != 1:
        raise ValueError(f"{place} has the shape {tuple(labels.shape)}: integer labels have the shape (batch,).")
    if labels.device.type == "cpu" and len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise ValueError(
            f"{place} holds {int(labels.min())} to {int(labels.max())}: with classes={classes} they are from 0 to "
            f"{classes - 1}."
        )
    zeros = torch.zeros(len(labels), classes, device=labels.device, dtype=torch.float32)
    return zeros.scatter_(1, labels.long()[:, None], 1.0)


def mix_labels(labels: Tensor, partners: Tensor, weights: Tensor) -> Tensor:
    """``weights * labels + (1 - weights) * labels[partners]``, row by row.

    Args:
        labels: Probabilities, ``(batch, classes)``.
        partners: Int64 ``(batch,)``: the sample that each is mixed with.
        weights: Float32 ``(batch,)``: the share that each keeps of itself.

    >>> mix_labels(torch.eye(2), torch.tensor([1, 0]), torch.tensor([0.75, 1.0]))
    tensor([[0.7500, 0.2500],
            [0.0000, 1.0000]])
    """
    return torch.lerp(labels[partners], labels, weights[:, None])


def mix_images(images: Tensor, partners: Tensor, weights: Tensor) -> Tensor:
    """``weights * images + (1 - weights) * images[partners]``, sample by sample, computed in float32.

    Args:
        images: ``(batch, channels, height, width)``; uint8 becomes float32 from 0 to 1, floats keep their dtype.
        partners: Int64 ``(batch,)``: the sample that each is mixed with.
        weights: Float32 ``(batch,)``: the share that each keeps of itself.

    >>> images = torch.tensor([0.0, 1.0]).reshape(2, 1, 1, 1)
    >>> mix_images(images, torch.tensor([1, 0]), torch.tensor([0.75, 1.0])).flatten()
    tensor([0.2500, 1.0000])
    """
    own = images.float() / 255 if images.dtype == torch.uint8 else images.float()
    mixed = torch.lerp(_taken(own, partners), own, weights[:, None, None, None])
    return mixed if images.dtype == torch.uint8 else mixed.to(images.dtype)


def cut_images(images: Tensor, partners: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
    """The images with a box of each taken from its partner, and the share that each keeps of itself.

    Args:
        images: ``(batch, channels, height, width)``, uint8 or floats; the dtype is kept.
        partners: Int64 ``(batch,)``: the sample whose pixels fill the box.
        boxes: Int64 ``(batch, 4)``: top, left, height and width, inside of the image.

    Returns:
        The images, and one minus the area of the box over that of the image, float32 ``(batch,)``.

    >>> images = torch.arange(2.0).reshape(2, 1, 1, 1).expand(2, 1, 2, 2)
    >>> mixed, weights = cut_images(images, torch.tensor([1, 0]), torch.tensor([[0, 0, 1, 2], [0, 0, 0, 0]]))
    >>> mixed[0, 0], weights
    (tensor([[1., 1.],
            [0., 0.]]), tensor([0.5000, 1.0000]))
    """
    height, width = images.shape[2:]
    mixed = torch.where(boxes_as_mask(boxes, height, width), _taken(images, partners), images)
    return mixed, 1 - (boxes[:, 2] * boxes[:, 3]).float() / (height * width)


def draw_beta(alpha: float, count: int, generator: torch.Generator | None, device: torch.device | str) -> Tensor:
    """So many numbers from Beta(alpha, alpha), float32 ``(count,)``, for any ``alpha`` above 0.

    As the ratio of Gamma variables, whose logarithms are drawn, so that a small ``alpha`` does not underflow. The
    rejection sampling behind them tries eight times at once, of which each fails with a chance below one in twenty.

    >>> bool(((numbers := draw_beta(0.2, 1000, None, "cpu")) >= 0).all() and (numbers <= 1).all())
    True
    """
    d = alpha + 1 - 1 / 3  # Gamma(alpha) is Gamma(alpha + 1) times a uniform number to the power of 1 / alpha
    normal = torch.randn(2, count, _TRIES, generator=generator, device=device, dtype=torch.float32)
    uniform = torch.rand(2, count, _TRIES + 1, generator=generator, device=device, dtype=torch.float32)
    uniform = uniform.clamp(min=2.0**-25)
    volume = (1 + normal / (9 * d) ** 0.5) ** 3
    log_volume = volume.clamp(min=1e-30).log()
    good = (volume > 0) & (uniform[..., 1:].log() < 0.5 * normal**2 + d * (1 - volume + log_volume))
    first = good.byte().argmax(dim=2, keepdim=True)
    log_gamma = log_volume.gather(2, first).squeeze(2) + uniform[..., 0].log() / alpha
    return torch.sigmoid(log_gamma[0] - log_gamma[1])


def _taken(images: Tensor, samples: Tensor) -> Tensor:
    if is_channels_last(images):
        return images.permute(0, 2, 3, 1)[samples].permute(0, 3, 1, 2)
    return images[samples]


class _Mix(LabelOperation):
    def __init__(self, classes: int, alpha: float, probability: float) -> None:
        self.classes = checked_integer("classes", classes, 2)
        self.alpha = checked_number("alpha", alpha, 0, open_ends=True)
        self.probability = checked_number("probability", probability, 0, 1)

    def draw(self, images: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """The partner and the weight of each sample, int64 and float32 of shape ``(batch,)``; weight 1 mixes nothing.

        The partners are a random order of the batch, so a sample may be its own.
        """
        count, device = len(images), images.device
        partners = torch.randperm(count, generator=generator, device=device)
        weights = draw_beta(self.alpha, count, generator, device)
        return partners, torch.where(draw_chosen(images, self.probability, generator), weights, 1.0)

    def _checked(self, images: Tensor, labels: Tensor) -> Tensor:
        check_images(images)
        soft = soft_labels(labels, self.classes)
        if len(soft) != len(images):
            raise ValueError(f"{self!r} got {len(images)} images and {len(soft)} labels: each image needs its own.")
        return soft


class MixUp(_Mix):
    """Each sample as a weighted mean with another of its batch.

    Args:
        classes: The number of classes.
        alpha: Weights are from Beta(alpha, alpha): 1 makes all alike, a small one leaves most samples nearly alone.
        probability: That a sample is mixed at all.

    >>> images, labels = MixUp(classes=10)(torch.rand(8, 3, 4, 4), torch.arange(8))
    >>> images.shape, labels.shape, bool((labels.sum(dim=1) - 1).abs().max() < 1e-6)
    (torch.Size([8, 3, 4, 4]), torch.Size([8, 10]), True)
    """

    def __init__(self, *, classes: int, alpha: float = 0.2, probability: float = 1.0) -> None:
        super().__init__(classes, alpha, probability)

    @override
    def __call__(
        self, images: Tensor, labels: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        soft = self._checked(images, labels)
        partners, weights = self.draw(images, generator)
        return mix_images(images, partners, weights), mix_labels(soft, partners, weights)


class CutMix(_Mix):
    """Each sample with a box of it replaced by the same box of another.

    The box has the share ``1 - weight`` of the image and the image's proportions. Its centre may lie anywhere, so a
    part can fall outside; the labels go by the part inside.

    Args:
        classes: The number of classes.
        alpha: Weights are from Beta(alpha, alpha); 1 makes all alike.
        probability: That a sample is mixed at all.

    >>> images, labels = CutMix(classes=10)(torch.zeros(8, 3, 4, 4, dtype=torch.uint8), torch.arange(8))
    >>> images.dtype, labels.shape, bool((labels.sum(dim=1) == 1).all())
    (torch.uint8, torch.Size([8, 10]), True)
    """

    def __init__(self, *, classes: int, alpha: float = 1.0, probability: float = 1.0) -> None:
        super().__init__(classes, alpha, probability)

    def draw_boxes(self, images: Tensor, weights: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Top, left, height and width of each sample's box as far as it is inside, int64 ``(batch, 4)``."""
        ends = []
        for limit in images.shape[2:]:
            side = ((1 - weights).sqrt() * limit).long()
            centre = torch.randint(limit, side.shape, generator=generator, device=side.device)
            start = centre - side // 2
            ends.append((start.clamp(min=0), (start + side).clamp(max=limit)))
        (top, bottom), (left, right) = ends
        return torch.stack([top, left, bottom - top, right - left], dim=1)

    @override
    def __call__(
        self, images: Tensor, labels: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        soft = self._checked(images, labels)
        partners, weights = self.draw(images, generator)
        boxes = self.draw_boxes(images, weights, generator)
        mixed, kept = cut_images(images, partners, boxes)
        return mixed, mix_labels(soft, partners, kept)

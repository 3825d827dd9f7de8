"""Augmentation and normalisation of whole batches, on the device, between the loader and the model.

What it does: it applies a list of operations to the images of a batch: the kit's own, which draw for each sample,
modules of kornia and of torchvision.transforms.v2 as they are, or any callable. Which numbers are drawn depends on the
seed that it is given, so that a resumed run augments as the unbroken one would have.
When it helps: loader workers that are busy with augmentation; uint8 images, which are a quarter of the bytes of float32
on the way to the device.
What it costs: some passes over the batch on the device, and the launch of some small kernels for each operation.

Source: Lightning #10469 (augmentation on the device that belongs to the data and not to the model).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lightning_speedkit.data.argument_checks import a_type
from lightning_speedkit.data.device.batch_place import Place, checked_place, place_name, replace_at, value_at
from lightning_speedkit.data.device.batch_random import batch_generator, contained_random
from lightning_speedkit.data.device.device_operation import (
    ImageOperation,
    LabelOperation,
    check_images,
    is_channels_last,
)
from lightning_speedkit.errors import LoaderError

__all__ = ["DeviceTransform"]


class DeviceTransform:
    """Operations on the images of a batch: ``train`` in training only, then ``always`` in training and evaluation.

    An operation is one of the kit's (:class:`RandomCrop`, :class:`RandomFlip`, :class:`RandomErase`, :class:`MixUp`,
    :class:`CutMix`, :class:`Normalize`), a subclass of :class:`ImageOperation` or :class:`LabelOperation`, or anything
    that is called with the images and returns them, such as a module of kornia or of torchvision.transforms.v2. The
    kit's own take uint8 and floats, wherever ``Normalize`` stands; before a module that takes floats only, put
    ``Normalize()``. A module is moved to the device of the batch when it is elsewhere; its mode is left as it is.

    Args:
        train: Operations for training, in their order.
        always: Operations for each batch, after those; nothing that is random.
        image: Where the images are in a batch: the number of an element, a key, a list of these that leads to a batch
            within a batch (``["views", 0]``), or ``None`` if the batch is the images themselves.
        label: Likewise for the labels, which only ``MixUp`` and ``CutMix`` look for.

    Raises:
        TypeError: An operation cannot be called, or a list is none.
        ValueError: A random operation is among ``always``.

    Example::

        >>> from lightning_speedkit.data.device.device_augment import RandomFlip
        >>> from lightning_speedkit.data.device.device_normalize import Normalize
        >>> transform = DeviceTransform(train=[RandomFlip(probability=1.0)], always=[Normalize()])
        >>> batch = torch.tensor([0, 255], dtype=torch.uint8).reshape(1, 1, 1, 2), torch.tensor([3])
        >>> transform(batch, training=True, seed=(0,))
        (tensor([[[[1., 0.]]]]), tensor([3]))
        >>> transform(batch, training=False, seed=(0,))
        (tensor([[[[0., 1.]]]]), tensor([3]))
    """

    def __init__(
        self,
        train: Sequence[Callable[..., Any]] = (),
        always: Sequence[Callable[..., Any]] = (),
        *,
        image: Place = 0,
        label: Place = 1,
    ) -> None:
        self.train = _checked_operations("train", train)
        self.always = _checked_operations("always", always)
        for operation in self.always:
            if _mixes_labels(operation) or (isinstance(operation, ImageOperation) and operation.random):
                raise ValueError(f"always holds {operation!r}, which is random: put it into train.")
        self.image = checked_place("image", image)
        self.label = checked_place("label", label)
        if self.image == self.label and any(map(_mixes_labels, self.train)):
            raise ValueError(
                f"image and label are both {image!r}: {next(filter(_mixes_labels, self.train))!r} needs two."
            )

    def __call__(self, batch: Any, *, training: bool, seed: Sequence[int]) -> Any:
        """The batch with its images, and with its labels where they are mixed, replaced; all else is the same object.

        Args:
            batch: On the device where the operations are to run.
            training: Whether ``train`` runs too.
            seed: What the random numbers depend on, integers from 0; see :func:`training_seed`.

        Raises:
            ValueError: There is nothing at the place of the images or labels, or it does not fit an operation.
            TypeError: What is there is no tensor, or has a dtype that an operation does not take.
            LoaderError: An operation that is not one of the kit's failed, or returned something else than images.
        """
        operations = self._operations(training)
        if not operations:
            return batch
        images = value_at(batch, self.image, "image")
        if not isinstance(images, Tensor):
            check_images(images, place_name(self.image))
        mixing = any(_mixes_labels(operation) for _, operation in operations)
        labels = value_at(batch, self.label, "label") if mixing else None
        for position, operation in operations:
            images, labels = self._applied(operation, images, labels, [*seed, position])
        batch = replace_at(batch, self.image, images)
        return replace_at(batch, self.label, labels) if mixing else batch

    def __repr__(self) -> str:
        places = "".join(
            f", {name}={(keys[0] if len(keys) == 1 else list(keys) or None)!r}"
            for name, keys, default in (("image", self.image, (0,)), ("label", self.label, (1,)))
            if keys != default
        )
        return f"DeviceTransform(train={list(self.train)!r}, always={list(self.always)!r}{places})"

    def _operations(self, training: bool) -> list[tuple[int, Callable[..., Any]]]:
        """With the position of each, which is a part of its seed and does not depend on ``training``."""
        numbered = list(enumerate((*self.train, *self.always)))
        return numbered if training else numbered[len(self.train) :]

    def _applied(
        self, operation: Callable[..., Any], images: Tensor, labels: Any, seed: Sequence[int]
    ) -> tuple[Tensor, Any]:
        place = place_name(self.image)
        if isinstance(operation, ImageOperation):
            generator = batch_generator(seed, images.device) if operation.random else None
            return operation(check_images(images, place), generator), labels
        if isinstance(operation, LabelOperation):
            if not isinstance(labels, Tensor):
                raise TypeError(f"{place_name(self.label)} is {a_type(labels)}: labels are a tensor.")
            return operation(check_images(images, place), labels, batch_generator(seed, images.device))
        return _applied_foreign(operation, images, labels, seed, place)


def _checked_operations(name: str, operations: Sequence[Callable[..., Any]]) -> tuple[Callable[..., Any], ...]:
    if not isinstance(operations, list | tuple):
        raise TypeError(f"{name} must be a list of operations, got {a_type(operations)}.")
    for operation in operations:
        if isinstance(operation, type):
            raise TypeError(f"{name} holds the class {operation.__name__}: write {operation.__name__}(...).")
        if not callable(operation):
            raise TypeError(
                f"{name} must hold operations that can be called with a batch of images, got {operation!r}."
            )
    return tuple(operations)


def _mixes_labels(operation: Callable[..., Any]) -> bool:
    """Whether it takes and returns labels too: the kit's own, and MixUp and CutMix of torchvision.transforms.v2."""
    if isinstance(operation, LabelOperation):
        return True
    kind = type(operation)
    return kind.__module__.startswith("torchvision.") and kind.__name__ in ("MixUp", "CutMix")


def _applied_foreign(
    operation: Callable[..., Any], images: Tensor, labels: Any, seed: Sequence[int], place: str
) -> tuple[Tensor, Any]:
    what = f"{place}, {images.dtype} of shape {tuple(images.shape)}"
    mixes = _mixes_labels(operation)
    if isinstance(operation, nn.Module) and any(
        tensor.device != images.device for tensor in chain(operation.parameters(), operation.buffers())
    ):
        operation.to(images.device)
    with contained_random(seed, images.device):
        try:
            result = operation(images, labels) if mixes else operation(images)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            hint = "" if images.is_floating_point() else " If it takes floats only, put Normalize() before it."
            raise LoaderError(f"{operation!r} failed on {what}: {error}.{hint}") from error
    new, labels = result if mixes else (result, labels)
    if not isinstance(new, Tensor):
        raise LoaderError(f"{operation!r} was given {what} and returned {a_type(new)}, not images.")
    if new.ndim == 0 or len(new) != len(images):
        raise LoaderError(f"{operation!r} was given {what} and returned the shape {tuple(new.shape)}: another batch.")
    if is_channels_last(images) and new.ndim == 4:
        new = new.contiguous(memory_format=torch.channels_last)
    return new, labels

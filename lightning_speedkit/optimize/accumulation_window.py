"""The arithmetic of gradient accumulation, for any training loop: a plain one, Fabric's, or manual optimization.

What it does: it gives the micro-batches of one window the weights with which their gradients sum up to that of one
big batch. When it helps: micro-batches of different sizes, short last windows, ranks with different numbers of
samples. What it costs: nothing while all micro-batches are equal. Source: Lightning #19987 and #20350.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_speedkit.optimize.batch_split import samples_of

__all__ = ["AccumulationWindow", "samples_in", "scale_gradients", "weigh_backward", "whole_number"]


@dataclass(slots=True)
class AccumulationWindow:
    """The samples of one window of micro-batches, and the weights that make its gradient that of one big batch.

    Give each micro-batch's mean loss the weight that :meth:`add` returns, and scale the sum of their gradients by
    :meth:`scale`. Weights are relative to the first micro-batch, so equal micro-batches have a weight of exactly 1.

    With ranks that average their gradients (DDP), scale the gradients *before* the last backward of the window, the
    one that synchronises, and multiply the weight of the last loss by the same number. ``samples`` and ``batches``
    say what was added so far, on this rank.

    Under float16, where a weight of 400 makes gradients infinite, first scale the gradients so far by
    :meth:`raise_reference`.

    Args:
        divided_by: What each loss is divided by already; Lightning divides by its accumulation factor.
        reference: The number of samples that has weight 1; 0 takes that of the first micro-batch. Ranks need the same
            one only where gradients are averaged before the window ends.

    Example:

        >>> model, x = torch.nn.Linear(1, 1, bias=False), torch.arange(1.0, 5.0).reshape(4, 1)
        >>> window = AccumulationWindow()
        >>> for micro_batch in (x[:1], x[1:]):  # 1 and 3 samples
        ...     (model(micro_batch).mean() * window.add(len(micro_batch))).backward()
        >>> scale_gradients(model.parameters(), window.scale())
        1
        >>> model.weight.grad.item()  # the mean of 1, 2, 3, 4
        2.5
    """

    divided_by: int = 1
    reference: float | Tensor = 0.0
    samples: int | Tensor = field(default=0, init=False)
    batches: int = field(default=0, init=False)

    def add(self, samples: int | Tensor) -> float | Tensor:
        """Count a micro-batch of so many samples, and return the weight of its mean loss.

        The weight is a tensor if the number is one on another device than the CPU: then nothing waits for it.
        """
        if type(samples) is not int or samples < 0:
            samples = whole_number(samples)
        self.batches += 1
        self.samples = self.samples + samples
        if isinstance(samples, int) and isinstance(self.reference, (int, float)) and self.reference:  # nearly always
            return samples / self.reference
        if isinstance(self.reference, Tensor):
            self.reference = torch.where(self.reference > 0, self.reference, samples)
        else:
            self.reference = self.reference or samples
        if isinstance(samples, Tensor) or isinstance(self.reference, Tensor):
            return torch.nan_to_num(samples / self.reference, nan=0.0)  # type: ignore[arg-type]  # 0 / 0
        return samples / self.reference if samples else 0.0

    def raise_reference(self, samples: int | Tensor) -> float | Tensor:
        """Make so many samples the reference if they are more, so that the next weight is not above 1.

        Returns:
            What the gradients so far are to be multiplied by before the micro-batch is added; 1.0 leaves them alone.
        """
        samples, found = whole_number(samples), self.reference
        if isinstance(found, Tensor) or isinstance(samples, Tensor):
            if not isinstance(found, Tensor):
                found = torch.full_like(samples, found)  # type: ignore[arg-type]
            larger = found.clamp(min=samples)
            self.reference = torch.where(found > 0, larger, found)
            return torch.where(found > 0, found / larger, 1.0)
        if not 0 < found < samples:
            return 1.0
        self.reference = samples
        return found / samples

    def scale(self, all_samples: float | Tensor | None = None, ranks: int = 1) -> float | Tensor:
        """What the summed gradients are to be multiplied by.

        Args:
            all_samples: The samples of this window over all ranks, a number or a tensor of no dimension; ``None`` on
                one rank.
            ranks: The number of ranks whose gradients are averaged.

        Returns:
            A number, or a tensor if there is one among what it is made of, so that nothing waits for the device.
        """
        total = self.samples if all_samples is None else all_samples
        total = total.clamp(min=1) if isinstance(total, Tensor) else max(total, 1)
        return self.divided_by * ranks * self.reference / total


def whole_number(samples: int | Tensor) -> int | Tensor:
    """As a plain ``int``, since a weight from a tensor of whole numbers would be a float32.

    A tensor on another device than the CPU stays there, in double precision where the device has it: to read it would
    wait for the device.

    Raises:
        TypeError: It is no whole number.
        ValueError: It is below 0, and not on another device.
    """
    if isinstance(samples, Tensor) and not _is_free_to_read(samples):
        if samples.numel() != 1 or samples.is_floating_point() or samples.is_complex():
            raise TypeError(f"A micro-batch cannot have {samples!r} samples; the number is a whole one.")
        return samples.detach().reshape(()).to(torch.float32 if samples.device.type == "mps" else torch.float64)
    try:
        number = operator.index(samples)
    except TypeError:
        raise TypeError(f"A micro-batch cannot have {samples!r} samples; the number is a whole one.") from None
    if number < 0:
        raise ValueError(f"A micro-batch cannot have {number} samples; the number is 0 or more.")
    return number


def _is_free_to_read(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def scale_gradients(parameters: Iterable[Tensor], scale: float | Tensor) -> int:
    """Multiply the gradients in place; returns how many there were. A scale of exactly 1.0 changes nothing.

    Args:
        parameters: The parameters; those without a gradient are passed over.
        scale: A number, or a tensor of no dimension best on the device of the gradients.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> weight.grad = torch.tensor([1.0, 2.0])
    >>> scale_gradients([weight, torch.nn.Parameter(torch.ones(1))], 0.5)
    1
    >>> weight.grad
    tensor([0.5000, 1.0000])
    """
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            # of a sharded gradient, this rank's part, in the same memory
            own = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            alike[own.device, own.dtype].append(own)
    if isinstance(scale, Tensor) or scale != 1.0:
        for (device, dtype), gradients in alike.items():
            factor = scale.to(device, dtype) if isinstance(scale, Tensor) else scale
            torch._foreach_mul_(gradients, factor)  # in place: DDP's gradients are views into its buckets
    return sum(map(len, alike.values()))


def weigh_backward(loss: Tensor, weight: float | Tensor) -> None:
    """Let the backward of a loss give ``weight`` times its gradient; the value of the loss stays as it is.

    Args:
        loss: A tensor with a graph. A weight of exactly 1.0 leaves it alone.
        weight: A number, or a tensor of no dimension on the device of the loss.

    >>> x = torch.ones(1, requires_grad=True)
    >>> weigh_backward(loss := x.mean(), 3.0)
    >>> loss.backward()
    >>> x.grad, loss.item()
    (tensor([3.]), 1.0)
    """
    if isinstance(weight, Tensor):
        factor = weight.to(loss.dtype)
        loss.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]
    elif weight != 1.0:
        loss.register_hook(lambda gradient: gradient * weight)  # type: ignore[no-untyped-call]


def samples_in(batch: Any) -> int:
    """The number of samples in a batch, as :func:`~lightning_speedkit.optimize.batch_split.samples_of` tells it.

    What is of an unknown type is passed over.

    Raises:
        ValueError: The number cannot be told.

    >>> samples_in({"image": torch.zeros(8, 3, 4, 4), "label": torch.zeros(8), "name": ["a"] * 8})
    8
    >>> samples_in((torch.zeros(8, 2), torch.zeros(5)))
    Traceback (most recent call last):
        ...
    ValueError: Cannot tell the samples of a tuple: its tensors have batch dimensions of 5 and 8.
    """
    if type(batch) is Tensor and batch.ndim:
        return batch.shape[0]
    return samples_of(batch, strict=False)

"""The gradients of one batch, kept apart until they are complete, and averaged over ranks once they are.

When it helps: a backward pass that fails half-way has changed some gradients and not others. What it costs: inside an
accumulation window, the memory of one more gradient while a batch is computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch.overrides.distributed import prepare_for_backward
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["NewGradients", "add_gradients", "synchronize_gradients"]


class NewGradients:
    """Sets the gradients of parameters aside, so that backward passes start from none.

    Then either :meth:`add` what the passes gave to what was set aside, or :meth:`discard` it, or take it away with
    :meth:`detach` and add it later with :func:`add_gradients`.

    Args:
        parameters: The parameters.

    Example:

        >>> weight = nn.Parameter(torch.ones(2))
        >>> weight.sum().backward()
        >>> new = NewGradients([weight])
        >>> (2 * weight).sum().backward()
        >>> weight.grad, new.add(), weight.grad
        (tensor([2., 2.]), None, tensor([3., 3.]))
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._held = [(parameter, parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        for parameter, _ in self._held:
            parameter.grad = None

    def restart(self) -> None:
        """Drop what backward passes gave so far."""
        for parameter in self._parameters:
            parameter.grad = None

    def detach(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Take the new gradients away, and put back what was set aside."""
        new = [(parameter, parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        self.discard()
        return new

    def discard(self) -> None:
        """Put back what was set aside."""
        self.restart()
        for parameter, held in self._held:
            parameter.grad = held

    def add(self) -> None:
        """Put back what was set aside, with the new gradients added to it."""
        for parameter, held in self._held:
            if parameter.grad is not None:
                held.add_(parameter.grad)
            parameter.grad = held


def add_gradients(new: list[tuple[nn.Parameter, Tensor]], scale: Tensor | None = None) -> None:
    """Add tensors to the gradients of parameters, in place where there is one.

    Args:
        new: What to add to which; the tensors are changed.
        scale: What to multiply it by first, a tensor of no dimension.
    """
    for parameter, gradient in new:
        if scale is not None:
            gradient.mul_(scale.to(gradient.device, gradient.dtype))
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.add_(gradient)


class _Zero(torch.autograd.Function):
    """A zero that depends on each of its inputs with a gradient of zero."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return inputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004
        return tuple(tensor.new_zeros(()).expand_as(tensor) for tensor in ctx.saved_tensors)


def synchronize_gradients(model: DistributedDataParallel) -> None:
    """Average the gradients that backward passes under ``no_sync`` left, as one synchronising backward would have.

    It is a backward pass that adds zero to each gradient, so that torch's own reducer sends them: in its buckets,
    with its communication hook, and with unused parameters as it was told. Call it on all ranks, outside
    ``no_sync``.

    Args:
        model: A wrapped model, not with a static graph.
    """
    used = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.grad is not None]
    zero = _Zero.apply(*used)  # type: ignore[no-untyped-call]
    prepare_for_backward(model, zero)
    zero.backward()

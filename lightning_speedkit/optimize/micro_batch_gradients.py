"""The gradients of one batch, kept apart until they are complete, and averaged over ranks once they are.

When it helps: a backward pass that fails half-way has changed some gradients and not others. What it costs: inside an
accumulation window, the memory of one more gradient while a batch is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
                held = _sum(held, parameter.grad)
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
            parameter.grad = _sum(parameter.grad, gradient)


def _sum(held: Tensor, new: Tensor) -> Tensor:
    """In place, for it may be a view into a bucket; but what is sparse cannot hold what is not."""
    return new + held if held.is_sparse and not new.is_sparse else held.add_(new)


class _Zero(torch.autograd.Function):
    """A zero that depends on each of its inputs with a gradient of zero, sparse where their own one is."""

    @staticmethod
    def forward(ctx: Any, sparse_dims: list[int | None], *inputs: Tensor) -> Tensor:
        ctx.sparse_dims = sparse_dims
        ctx.save_for_backward(*inputs)
        return inputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG004
        return None, *map(_zero_like, ctx.saved_tensors, ctx.sparse_dims)


def _zero_like(tensor: Tensor, sparse_dim: int | None) -> Tensor:
    if sparse_dim is None:
        return tensor.new_zeros(()).expand_as(tensor)
    indices = torch.empty((sparse_dim, 0), dtype=torch.int64, device=tensor.device)
    return torch.sparse_coo_tensor(indices, tensor.new_empty((0, *tensor.shape[sparse_dim:])), tensor.shape)


def synchronize_gradients(model: DistributedDataParallel) -> None:
    """Average the gradients that backward passes under ``no_sync`` left, as one synchronising backward would have.

    It is a backward pass that adds zero to each gradient, so that torch's own reducer sends them: in its buckets,
    with its communication hook, and with unused parameters as it was told; sparse gradients stay sparse. Call it on
    all ranks, outside ``no_sync``.

    Args:
        model: A wrapped model, not with a static graph.
    """
    used = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.grad is not None]
    gradients = [parameter.grad for parameter in used if parameter.grad is not None]
    sparse_dims = [gradient.sparse_dim() if gradient.is_sparse else None for gradient in gradients]
    apply: Callable[..., Tensor] = _Zero.apply  # untyped in some torch versions
    zero = apply(sparse_dims, *used)
    prepare_for_backward(model, zero)
    torch.autograd.backward(zero)

"""Gradients sent as products of two thin matrices: PowerSGD, as a communication hook of torch's DDP.

What it does: the gradient of a layer, an ``n`` by ``m`` matrix, is sent as ``P`` (``n`` by rank) and ``Q`` (``m`` by
rank). What the product lacks is kept on this rank and added to the gradient of the next step, so that it comes late
and not never. Gradients that would not get smaller, biases among them, are sent as they are.

It differs from torch's hook of this name in what it survives: with many buckets, torch's blocks the threads of gloo
that it waits for; there, a gradient that holds an infinity once (as with a gradient scaler) makes all later ones NaN;
and its state belongs to buckets, here to parameters, so that a second ``fit`` of a module goes on with it.

When it helps: a slow link between the ranks and large matrices. What it costs: precision of the gradients, memory for
one copy of them, two small decompositions per layer and step, and the sending no longer overlaps with the backward.

Source: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
NeurIPS 2019 (arXiv:1905.13727).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_speedkit.parallel.argument_checks import checked_integer

__all__ = ["PowerSGD"]

_WORTH = 2  # compress only what gets smaller by more than this factor
Send = Callable[[Tensor], None]


class PowerSGD:
    """What a rank remembers of the gradients of one module. For :func:`register_comm_hook`.

    Args:
        rank: The columns of ``P`` and ``Q``: more is more precise and more to send.
        start_step: Gradients are sent whole for so many steps; early ones are the least like low-rank matrices.

    Raises:
        ValueError: ``rank`` is below 1, or ``start_step`` below 0.
        TypeError: One of them is no whole number.

    Attributes:
        steps: How many steps were sent, over all fits of this module.

    Example:

        >>> PowerSGD(rank=2).sent_numbers((512, 256)), 512 * 256
        (1536, 131072)
        >>> PowerSGD(rank=2).sent_numbers((10,))
        10
    """

    def __init__(self, rank: int = 2, start_step: int = 100) -> None:
        self.rank = checked_integer("rank", rank, 1)
        self.start_step = checked_integer("start_step", start_step, 0)
        self.steps = 0
        self._names: dict[int, str] = {}
        self._module: weakref.ref[nn.Module] | None = None
        self._errors: dict[str, Tensor] = {}
        self._qs: dict[str, Tensor] = {}

    def sent_numbers(self, shape: Sequence[int]) -> int:
        """How many numbers are sent for a gradient of this shape, once ``start_step`` is reached."""
        rows, columns = _as_matrix(shape)
        thin = min(rows, columns, self.rank) * (rows + columns)
        return thin if thin * _WORTH < rows * columns else rows * columns

    def follow(self, module: nn.Module) -> None:
        """Send the gradients of this module from now on; of another one than before, with nothing remembered."""
        if self._module is None or self._module() is not module:
            self.steps, self._errors, self._qs = 0, {}, {}
        self._module = weakref.ref(module)
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}

    def average(self, gradients: Sequence[Tensor], parameters: Sequence[Tensor], send: Send, ranks: int) -> None:
        """Replace each gradient by the mean over all ranks, or what rank ``rank`` matrices give of it.

        Args:
            gradients: Those of this rank, in any shapes; they are written to.
            parameters: The parameter of each.
            send: Replaces the vector that it gets by the sum over all ranks.
            ranks: How many ranks there are.
        """
        names = [self._names[id(parameter)] for parameter in parameters]
        pairs = list(zip(names, gradients, strict=True))
        whole = [gradient for _, gradient in pairs if self.sent_numbers(gradient.shape) == gradient.numel()]
        thin = {name: g for name, g in pairs if self.sent_numbers(g.shape) < g.numel()}
        _sum_together(whole, send)
        for gradient in whole:
            gradient.div_(ranks)
        if thin:
            self._average_thin(thin, send, ranks)

    def _average_thin(self, gradients: dict[str, Tensor], send: Send, ranks: int) -> None:
        matrices = {name: _at_least_float32(g).reshape(_as_matrix(g.shape)) for name, g in gradients.items()}
        for name, matrix in matrices.items():
            if name in self._errors:
                matrices[name] = matrix + self._errors[name].to(matrix.device)
        qs = {name: _orthonormal(self._start_of_q(name, matrix)) for name, matrix in matrices.items()}
        ps = {name: matrix @ qs[name] for name, matrix in matrices.items()}
        _sum_together(list(ps.values()), send)
        for name, matrix in matrices.items():
            ps[name] = _orthonormal(ps[name])
            qs[name] = matrix.T @ ps[name]
        _sum_together(list(qs.values()), send)
        for name, matrix in matrices.items():
            q = qs[name].div_(ranks)
            product = ps[name] @ q.T
            # one step with an infinity must not be remembered; no host wait, so without a question
            self._errors[name] = torch.nan_to_num(matrix - product, nan=0.0, posinf=0.0, neginf=0.0)
            self._qs[name] = torch.nan_to_num(q, nan=0.0, posinf=0.0, neginf=0.0)
            gradients[name].copy_(product.view_as(gradients[name]))

    def _start_of_q(self, name: str, matrix: Tensor) -> Tensor:
        if name in self._qs:
            return self._qs[name].to(matrix.device)
        order = list(self._names.values()).index(name)  # the same on all ranks
        noise = torch.Generator().manual_seed(order)
        return torch.randn(matrix.shape[1], min(*matrix.shape, self.rank), generator=noise).to(matrix)


def power_sgd_hook(state: Any, bucket):  # type: ignore[no-untyped-def]  # torch refuses other annotations than its own
    """The hook for ``DistributedDataParallel.register_comm_hook``; its state is a group and a :class:`PowerSGD`."""
    group, memory = state
    buffer, ranks = bucket.buffer(), torch.distributed.get_world_size(group)
    if memory.steps < memory.start_step:
        buffer.div_(ranks)
        torch.distributed.all_reduce(buffer, group=group)
    else:
        memory.average(
            bucket.gradients(),
            bucket.parameters(),
            lambda vector: torch.distributed.all_reduce(vector, group=group),
            ranks,
        )
    memory.steps += bucket.is_last()
    done: torch.futures.Future[Tensor] = torch.futures.Future(devices=None if buffer.is_cpu else [buffer.device])
    done.set_result(buffer)
    return done


def _as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    rows = shape[0] if shape else 1
    columns = 1
    for size in shape[1:]:
        columns *= size
    return rows, columns


def _at_least_float32(gradient: Tensor) -> Tensor:
    return gradient if gradient.dtype in (torch.float32, torch.float64) else gradient.float()


def _orthonormal(matrix: Tensor) -> Tensor:
    """Columns that span the same; those of a matrix of zeros are unit vectors, and never NaN."""
    result: Tensor = torch.linalg.qr(matrix).Q
    return result


def _sum_together(tensors: Sequence[Tensor], send: Send) -> None:
    if not tensors:
        return
    vector = torch.cat([tensor.reshape(-1) for tensor in tensors])
    send(vector)
    start = 0
    for tensor in tensors:
        tensor.copy_(vector[start : start + tensor.numel()].view_as(tensor))
        start += tensor.numel()

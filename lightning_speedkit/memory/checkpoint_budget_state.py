"""Runs a batch on trial and leaves no trace: buffers, gradients and random state are afterwards what they were.

What it costs: a copy of the buffers and of the random states, and per run the time to put them back.
Source: the states that a forward and backward change; parameters are not among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_speedkit.memory.host_random import read_host_random, write_host_random

__all__ = ["as_found"]


@contextmanager
def as_found(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, the parameters have no gradients; afterwards gradients, buffers and random state are as found.

    The objects are as found too: a gradient, or a buffer that was written to in place, is the same tensor.

    >>> layer = nn.BatchNorm1d(2)
    >>> with as_found(layer, torch.device("cpu")):
    ...     layer(torch.rand(4, 2)).sum().backward()
    >>> layer.running_mean, layer.weight.grad
    (tensor([0., 0.]), None)
    """
    buffers = [
        (owner, name, buffer, None if buffer is None else buffer.detach().clone())
        for owner in model.modules()
        for name, buffer in owner._buffers.items()
    ]
    names = {owner: set(owner._buffers) for owner in model.modules()}
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    random, host = torch.get_rng_state(), read_host_random()
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        _put_back(buffers)
        for owner, known in names.items():
            for name in set(owner._buffers) - known:
                del owner._buffers[name]
        for parameter, gradient in gradients:
            parameter.grad = gradient
        torch.set_rng_state(random)
        write_host_random(host)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)


def _put_back(buffers: list[tuple[nn.Module, str, Tensor | None, Tensor | None]]) -> None:
    with torch.no_grad():
        for owner, name, buffer, value in buffers:
            if buffer is not None and value is not None and not buffer.is_inference():
                buffer.copy_(value)
            owner._buffers[name] = buffer

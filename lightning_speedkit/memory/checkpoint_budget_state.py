"""Runs a batch on trial and leaves no trace: weights, buffers, gradients and random state are then what they were.

What it costs: a copy of the buffers and of the random states, and per run the time to put them back; a copy of the
weights in the memory of the host, since some steps write to them (clamped, normalized or averaged weights).
Source: the states that a forward and backward change, and weights, which are put back once after all runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_speedkit.memory.host_random import read_host_random, write_host_random

__all__ = ["as_found", "parameters_as_found"]


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


@contextmanager
def parameters_as_found(model: nn.Module) -> Iterator[None]:
    """Afterwards each module has the parameters it had, the same objects with the same values.

    Left out are parameters that have no values of their own: meta, lazy, expanded, and those of inference mode.

    >>> layer = nn.Linear(1, 1)
    >>> before = layer.weight.item()
    >>> with parameters_as_found(layer):
    ...     _ = nn.init.constant_(layer.weight, 5.0)
    >>> layer.weight.item() == before
    True
    """
    owned = [(owner, dict(owner._parameters)) for owner in model.modules()]
    # on the host: a copy on the device would raise the peak that is measured
    values = [(one, one.detach().to("cpu", copy=True)) for one in model.parameters() if _can_be_written(one)]
    try:
        yield
    finally:
        for owner, parameters in owned:
            owner._parameters.clear()
            owner._parameters.update(parameters)
        for parameter, value in values:
            parameter.data.copy_(value)  # a graph that holds the parameter does not see a write to its data


def _can_be_written(parameter: Tensor) -> bool:
    if parameter.is_meta or nn.parameter.is_lazy(parameter) or parameter.is_inference():
        return False
    return parameter.layout is not torch.strided or all(
        step != 0 or n <= 1 for step, n in zip(parameter.stride(), parameter.shape, strict=True)
    )


def _put_back(buffers: list[tuple[nn.Module, str, Tensor | None, Tensor | None]]) -> None:
    with torch.no_grad():
        for owner, name, buffer, value in buffers:
            if buffer is not None and value is not None and not buffer.is_inference():
                buffer.copy_(value)
            owner._buffers[name] = buffer

"""The smallest micro-batch of all ranks, and one way of stepping for all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_speedkit.measure.host_group import HostGroup
from lightning_speedkit.optimize.micro_batch_size import MicroBatchSize
from lightning_speedkit.optimize.micro_batch_step import RepeatableSteps

__all__ = ["agree"]


def agree(
    group: HostGroup, size: MicroBatchSize, steps: RepeatableSteps, optimizers: Iterable[torch.optim.Optimizer]
) -> None:
    """Take the smallest size of all ranks, and step parameter by parameter if one of them has to.

    Some optimizers round differently then. So the first time, what the last step gave is made the same on all ranks.
    Waits for all ranks.

    Raises:
        RuntimeError: Another rank is gone.
    """
    *largest, one_by_one = group.largest([*size.row(), steps.one_by_one])
    size.adopt([int(number) for number in largest])
    steps.one_by_one = bool(one_by_one)
    if not steps.one_by_one or steps.agreed:
        return
    steps.agreed = True
    for optimizer in optimizers:
        group.take_from_first(parameter for g in optimizer.param_groups for parameter in g["params"])
        state = list(_state_of(optimizer))
        nbytes = sum(tensor.nbytes for tensor in state)
        most, least = group.largest([nbytes, -nbytes])
        if most == -least:  # not where each rank has a part of it
            group.take_from_first(state)


def _state_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for key in sorted(state, key=str):
                yield from _parts_of(state[key])


def _parts_of(value: Any) -> Iterator[Tensor]:
    """The tensors of a value; a quantized state is one made of several."""
    if not isinstance(value, Tensor):
        return
    if not hasattr(value, "__tensor_flatten__"):
        yield value
        return
    for name in value.__tensor_flatten__()[0]:
        yield from _parts_of(getattr(value, name))

"""What stands in a model for the ``nn.Sequential`` whose layers are spread over the stages of a pipeline.

It holds the layers of this rank under their old names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from typing_extensions import override

__all__ = ["InputReached", "PipelinedLayers", "Stage"]


class InputReached(BaseException):
    """The user's step has come to the pipelined layers. No ``Exception``, so that a step does not catch it."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value


class Stage(nn.Module):
    """Some layers one after the other, in the context of a precision."""

    def __init__(self, layers: Sequence[nn.Module], context: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._context = context

    @override
    def forward(self, value: Tensor) -> Tensor:
        with self._context():
            for layer in self.layers:
                value = layer(value)
        return value


class PipelinedLayers(nn.Module):
    """Stands for the ``nn.Sequential`` that was cut.

    Without gradients all ranks of the pipeline call it together, and each gets the result of all layers. In a training
    step it answers with what ``answer`` holds, or raises :class:`InputReached`.
    """

    def __init__(self, whole: nn.Module, mine: Sequence[str], stages: dict[int, Stage], count: int, group: Any) -> None:
        super().__init__()
        for name in mine:
            self.add_module(name, whole.get_submodule(name))
        # not registered: the layers have their names already
        object.__setattr__(self, "stages", stages)
        self._count, self._group = count, group
        self.answer: Tensor | None = None
        self.catches_input = False
        self.calls = 0

    @override
    def forward(self, value: Tensor) -> Tensor:
        self.calls += 1
        if self.catches_input:
            raise InputReached(value)
        if self.answer is not None:
            return self.answer
        if torch.is_grad_enabled():
            raise MisconfigurationException(
                "The pipelined layers were called with gradients outside of training_step, where no schedule runs. "
                "Call them under torch.no_grad(), on all ranks."
            )
        ranks = dist.get_process_group_ranks(self._group)
        for index in range(self._count):
            value = self._of_one_stage(index, value, ranks[index % len(ranks)])
        return value

    def _of_one_stage(self, index: int, value: Tensor, owner: int) -> Tensor:
        told: list[Any] = [None]
        result = value
        if owner == dist.get_rank():
            stages: dict[int, Stage] = self.stages  # type: ignore[assignment]
            try:
                result = stages[index](value)
                told = [(tuple(result.shape), result.dtype)]
            except Exception as error:
                told = [f"Stage {index} failed: {type(error).__name__}: {error}"]
        dist.broadcast_object_list(told, src=owner, group=self._group)
        if isinstance(told[0], str):  # all ranks raise, so that none waits for another
            raise RuntimeError(f"{told[0]}. A stage takes one tensor and gives one.")
        shape, dtype = told[0]
        result = (
            result.contiguous() if owner == dist.get_rank() else torch.empty(shape, dtype=dtype, device=value.device)
        )
        dist.broadcast(result, src=owner, group=self._group)
        return result

"""The part of a model that is spread over the stages of a pipeline: how it is cut, and how it is called.

``balanced_split`` cuts a chain of layers where the dearest stage is cheapest. ``PipelinedLayers`` stands in the model
for the ``nn.Sequential`` that was cut; it holds the layers of this rank under their old names.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from typing_extensions import override

__all__ = ["InputReached", "PipelinedLayers", "Stage", "balanced_split", "check_layers", "measure_layers"]


def balanced_split(costs: Sequence[float], stages: int) -> list[int]:
    """Where to cut a chain of layers so that the dearest stage costs least.

    Args:
        costs: What each layer costs, in any one unit.
        stages: How many stages to make.

    Returns:
        The index of the first layer of each stage but the first.

    Raises:
        ValueError: There are more stages than layers.

    Example:

        >>> balanced_split([1, 1, 1, 3], 2), balanced_split([4, 2, 2, 4], 3)
        ([3], [1, 3])
    """
    layers = len(costs)
    if stages > layers:
        raise ValueError(
            f"{stages} stages of {layers} layers: a stage needs at least one. Use at most {layers} stages."
        )
    total = [0.0, *itertools.accumulate(float(cost) for cost in costs)]
    # best[end]: the cost of the dearest stage of layers[:end], and where its stages end
    best: dict[int, tuple[float, list[int]]] = {end: (total[end], []) for end in range(1, layers + 1)}
    for made in range(2, stages + 1):
        best = {
            end: min((max(best[cut][0], total[end] - total[cut]), [*best[cut][1], cut]) for cut in best if cut < end)
            for end in range(made, layers + 1)
        }
    return best[layers][1]


def measure_layers(layers: Sequence[nn.Module], value: Tensor, repeats: int = 3) -> list[float]:
    """Seconds of forward and backward of each layer in a chain, the least of some repeats.

    It works on copies, so weights, buffers and gradients stay as they are; random state is put back.
    """
    costs = []
    with torch.random.fork_rng(), torch.enable_grad():
        for layer in layers:
            trial, spent = copy.deepcopy(layer), []
            for _ in range(repeats):
                entry = value.detach().requires_grad_(value.is_floating_point())
                start = time.perf_counter()
                result = trial(entry)
                if result.requires_grad:
                    result.sum().backward()
                if value.is_cuda:
                    torch.cuda.synchronize(value.device)
                spent.append(time.perf_counter() - start)
            costs.append(min(spent))
            value = result.detach()
    return costs


def check_layers(model: nn.Module, name: str, stages: Sequence[Sequence[str]]) -> None:
    """Raise for what a pipeline would train wrongly.

    Args:
        model: The whole model.
        name: The attribute that is cut.
        stages: The names of the layers of each stage.
    """
    layers = model.get_submodule(name)
    inside = {id(tensor) for tensor in [*layers.parameters(), *layers.buffers()]}
    owner: dict[int, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for path, tensor in named:
        if tensor.requires_grad and id(tensor) not in inside:
            raise MisconfigurationException(
                f"The parameter {path!r} is outside of the pipelined attribute {name!r}, so no stage would train it. "
                "Put its layer into that attribute, or freeze it."
            )
        first = owner.setdefault(id(tensor), path)
        if first != path and id(tensor) in inside:
            raise MisconfigurationException(
                f"{first!r} and {path!r} are one tensor (tied weights), which would drift apart when its layers lie on "
                "different processes. Untie them."
            )
    for index, stage_names in enumerate(stages):
        parts = [layers.get_submodule(layer) for layer in stage_names]
        if not any(p.requires_grad for part in parts for p in part.parameters()):
            raise MisconfigurationException(
                f"Stage {index} (layers {', '.join(stage_names)} of {name!r}) has no parameter to train. "
                "Move the split_points, or use fewer stages."
            )
    for path, module in layers.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise MisconfigurationException(
                f"{name}.{path} is a {type(module).__name__}: under a pipeline it would see micro-batches, and its "
                "statistics would be wrong. Use GroupNorm or LayerNorm."
            )


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

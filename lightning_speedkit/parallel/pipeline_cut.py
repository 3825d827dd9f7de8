"""Where a chain of layers is cut into the stages of a pipeline, and what no cut of a model would train rightly."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Sequence
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

__all__ = ["balanced_split", "check_layers", "cut_points", "find_chain", "measure_layers", "stages_of"]


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


def find_chain(module: nn.Module, attribute: str | None) -> str:
    """The name of the ``nn.Sequential`` to cut: ``attribute``, or the only outermost one.

    >>> find_chain(nn.ModuleDict({"net": nn.Sequential(nn.Linear(1, 1))}), None)
    'net'
    """
    known = [
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.Sequential) and type(part).forward is nn.Sequential.forward
    ]
    outer = [name for name in known if not any(name.startswith(f"{other}.") for other in known)]
    if attribute is None and len(outer) == 1:
        return str(outer[0])
    if attribute is None or attribute not in known:
        raise MisconfigurationException(
            f"attribute={attribute!r} is no nn.Sequential of {type(module).__name__}, which has "
            f"{', '.join(map(repr, known)) or 'none'}. Name the one whose layers make the pipeline."
        )
    return attribute


def cut_points(module: nn.Module, name: str, count: int) -> list[int]:
    """The index of the first layer of each stage but the first, so that the dearest stage costs least.

    Costs are seconds of forward and backward if ``module`` has an ``example_input_array``, else parameters to train.
    A layer without such parameters goes with the one before it.
    """
    layers = _layers(module, name)
    sizes = [float(sum(p.numel() for p in layer.parameters() if p.requires_grad)) for layer in layers]
    trained = [index for index, size in enumerate(sizes) if size]
    if count > len(trained):
        raise MisconfigurationException(
            f"{count} stages are more than the {len(layers)} layers of {name!r}, of which {len(trained)} have "
            "parameters to train. Use fewer processes or stages_per_rank, or pipeline_size with data parallel beside "
            "it."
        )
    costs = _measured(module, name) or sizes
    starts = [0, *trained[1:], len(layers)]
    merged = [sum(costs[a:b]) for a, b in itertools.pairwise(starts)]
    return [starts[cut] for cut in balanced_split(merged, count)]


def stages_of(module: nn.Module, name: str, count: int, points: Sequence[int]) -> list[list[str]]:
    """The names of the layers of each of ``count`` stages.

    >>> chain = nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 1))
    >>> stages_of(nn.ModuleDict({"net": chain}), "net", 2, [2])
    [['0', '1'], ['2']]
    """
    chain = module.get_submodule(name)
    # a module without weights may stand in the chain several times
    names = [child for child, _ in chain.named_modules(remove_duplicate=False) if child and "." not in child]
    starts = [0, *points, len(names)]
    if len(points) != count - 1 or starts != sorted(set(starts)):
        raise MisconfigurationException(
            f"split_points={list(points)} must be {count - 1} rising layer indices from 1 to {len(names) - 1} for "
            f"{count} stages."
        )
    return [names[a:b] for a, b in itertools.pairwise(starts)]


def _layers(module: nn.Module, name: str) -> list[nn.Module]:
    chain = module.get_submodule(name)
    assert isinstance(chain, nn.Sequential)
    return list(chain)


def _measured(module: Any, name: str) -> list[float]:
    example, seen = getattr(module, "example_input_array", None), []
    if example is None:
        return []
    handle = module.get_submodule(name).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    try:
        with torch.no_grad(), torch.random.fork_rng():
            module(*(example if isinstance(example, tuple) else (example,)))
    finally:
        handle.remove()
    return measure_layers(_layers(module, name), seen[0]) if seen else []

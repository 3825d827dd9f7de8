"""One full state of the parts that the stages of a pipeline hold, and the part of one stage from the full state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import Optimizer

__all__ = ["gather", "gather_optimizer_state", "gather_tensors", "optimizer_state_of_stage"]


def gather(value: Any, group: Any) -> list[Any]:
    """What each rank of the group gives, in the order of its ranks; all call it."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def gather_tensors(tensors: Mapping[str, Any], order: Sequence[str], group: Any) -> dict[str, Any]:
    """All ranks' named tensors, on the CPU, in the given order of names."""
    found: dict[str, Any] = {}
    for part in gather(move_data_to_device(dict(tensors), torch.device("cpu")), group):
        found.update(part)
    return {name: found[name] for name in [*(n for n in order if n in found), *(n for n in found if n not in order)]}


def gather_optimizer_state(optimizer: Optimizer, places: Mapping[nn.Parameter, int], group: Any) -> dict[str, Any]:
    """The state that the optimizer of the whole model would have.

    Args:
        optimizer: That of this stage.
        places: The position of each parameter in the whole model.
        group: The ranks of the pipeline.
    """
    state = move_data_to_device(optimizer.state_dict(), torch.device("cpu"))
    parts = gather((state, _places_of(optimizer, places)), group)
    numbers = _numbers([of_rank for _, of_rank in parts])
    merged: dict[int, Any] = {}
    groups = [dict(one) for one in state["param_groups"]]
    for one in groups:
        one["params"] = []
    for part, of_rank in parts:
        for one, mine, of_group in zip(groups, part["param_groups"], of_rank, strict=True):
            one["params"] += [numbers[place] for place in of_group]
            for local, place in zip(mine["params"], of_group, strict=True):
                if local in part["state"]:
                    merged[numbers[place]] = part["state"][local]
    for one in groups:
        one["params"].sort()
    return {**state, "state": dict(sorted(merged.items())), "param_groups": groups}


def optimizer_state_of_stage(
    full: Mapping[str, Any], optimizer: Optimizer, places: Mapping[nn.Parameter, int], group: Any
) -> dict[str, Any]:
    """The part of a full state that belongs to the optimizer of this stage."""
    mine = _places_of(optimizer, places)
    numbers = _numbers(gather(mine, group))
    own = optimizer.state_dict()["param_groups"]
    if [len(g["params"]) for g in full["param_groups"]] != _sizes(gather(mine, group)):
        raise MisconfigurationException(
            "The optimizer state in the checkpoint has other groups of parameters than configure_optimizers gives now."
        )
    groups, state = [], {}
    for saved, local, of_group in zip(full["param_groups"], own, mine, strict=True):
        groups.append({**saved, "params": local["params"]})
        for index, place in zip(local["params"], of_group, strict=True):
            if numbers[place] in full["state"]:
                state[index] = full["state"][numbers[place]]
    return {**full, "state": state, "param_groups": groups}


def _places_of(optimizer: Optimizer, places: Mapping[nn.Parameter, int]) -> list[list[int]]:
    return [[places[parameter] for parameter in group["params"]] for group in optimizer.param_groups]


def _sizes(parts: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    return [sum(map(len, same)) for same in zip(*parts, strict=True)]


def _numbers(parts: Sequence[Sequence[Sequence[int]]]) -> dict[int, int]:
    """The number that torch gives to the parameter of each place: group by group, in the order of the model."""
    if len({len(part) for part in parts}) > 1:
        raise MisconfigurationException(
            "configure_optimizers makes a different number of parameter groups on each stage; make as many on each."
        )
    ordered = [place for same in zip(*parts, strict=True) for place in sorted(p for one in same for p in one)]
    return {place: number for number, place in enumerate(ordered)}

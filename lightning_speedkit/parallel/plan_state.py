"""Weights and optimizer state of a model that is spread over ranks: made whole, and taken apart again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_speedkit.errors import did_you_mean
from lightning_speedkit.parallel.plan_wrap import whole_value

__all__ = [
    "check_names",
    "copy_weights",
    "local_part",
    "optimizer_state",
    "optimizer_state_here",
    "whole_state",
]


def local_part(whole: Tensor, like: DTensor) -> Tensor:
    """What this rank holds of a whole tensor that is laid out as another one of its shape."""
    part, mesh = whole, like.device_mesh
    placements: Sequence[Any] = like.placements
    dims = list(enumerate(placements))
    if any(type(placement).__name__ == "_StridedShard" for placement in placements):
        dims.reverse()  # tensor parallel first, as FSDP2 cuts
    for index, placement in dims:
        if not placement.is_replicate():
            parts = part.chunk(mesh.size(index), placement.dim)
            rank = mesh.get_local_rank(index)
            part = parts[rank] if rank < len(parts) else part.narrow(placement.dim, 0, 0)
    return part


def copy_weights(module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Load a state dict of whole or of sharded tensors into a module of either.

    Raises:
        MisconfigurationException: Names or shapes do not fit.
    """
    own = module.state_dict()
    check_names("The checkpoint", state, own, strict)
    fitting: dict[str, Any] = {}
    for name, value in state.items():
        here = own.get(name)
        if isinstance(here, DTensor) and not isinstance(value, DTensor):
            part = local_part(value, here).to(here.to_local())
            value = DTensor.from_local(
                part, here.device_mesh, here.placements, run_check=False, shape=here.shape, stride=here.stride()
            )
        fitting[name] = value
    module.load_state_dict(fitting, strict=strict)


def check_names(what: str, state: Mapping[str, Any], own: Mapping[str, Any], strict: bool) -> None:
    missing = [name for name in own if name not in state]
    extra = [name for name in state if name not in own]
    if strict and (missing or extra):
        name = (missing or extra)[0]
        near = did_you_mean(name, extra if missing else own).replace("Did you mean", "It has")
        raise MisconfigurationException(
            f"{what} is of another model: it lacks {missing} and has {extra} beyond the model's.{near.rstrip('?')} "
            "Use the model that it was made of, or strict_loading=False."
        )
    for name in own:
        if name in state and isinstance(own[name], Tensor) and tuple(state[name].shape) != tuple(own[name].shape):
            raise MisconfigurationException(
                f"{what} has {name!r} in the shape {tuple(state[name].shape)}, and in the model it has "
                f"{tuple(own[name].shape)}. Use the model that it was made of."
            )


def optimizer_state(optimizer: Optimizer, whole: bool) -> dict[str, Any]:
    """Its state with whole tensors on the CPU of rank 0, empty elsewhere; or sharded as it is. All ranks call it."""
    state = optimizer.state_dict()
    if not whole:
        return state
    merged = {
        number: {key: _whole_on_cpu(value) for key, value in entries.items()}
        for number, entries in state["state"].items()
    }
    return {**state, "state": merged} if dist.get_rank() == 0 else {}


def whole_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """The same with whole tensors on the CPU of rank 0, empty elsewhere; all ranks call it."""
    found = {name: _whole_on_cpu(value) for name, value in state.items()}
    return found if dist.get_rank() == 0 else {}


def _whole_on_cpu(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    found = whole_value(value)
    return found.to("cpu", copy=True) if dist.get_rank() == 0 else None


def optimizer_state_here(full: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """The state that this rank's optimizer loads, of a whole or a sharded one.

    Raises:
        MisconfigurationException: It has other groups of parameters.
    """
    groups = optimizer.param_groups
    sizes = [len(group["params"]) for group in groups]
    if (found := [len(group["params"]) for group in full["param_groups"]]) != sizes:
        raise MisconfigurationException(
            f"The optimizer in the checkpoint has groups of {found} parameters, and configure_optimizers gives groups "
            f"of {sizes}."
        )
    parameters = [p for group in groups for p in group["params"]]
    numbers = [number for group in full["param_groups"] for number in group["params"]]
    state = {}
    for number, parameter in zip(numbers, parameters, strict=True):
        entries = full["state"].get(number, {})
        state[number] = {key: _laid_out(value, parameter) for key, value in entries.items()}
    return {**full, "state": {number: entries for number, entries in state.items() if entries}}


def _laid_out(value: Any, parameter: Tensor) -> Any:
    sharded = isinstance(parameter, DTensor) and isinstance(value, Tensor) and not isinstance(value, DTensor)
    if not sharded or value.shape != parameter.shape:
        return value
    assert isinstance(parameter, DTensor)
    part = local_part(value, parameter).to(parameter.to_local().device).contiguous()
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )

"""Checkpoints of a model that is spread over ranks: whole ones in one file, and sharded ones in a folder.

A whole one is that of the plain module, so that it loads without this strategy too. A sharded one has a file per rank;
it loads on any number of ranks, under any plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_speedkit.errors import did_you_mean
from lightning_speedkit.parallel.plan_wrap import whole_value

__all__ = [
    "copy_weights",
    "is_sharded_checkpoint",
    "local_part",
    "optimizer_state",
    "optimizer_state_here",
    "read_sharded",
    "unshard_checkpoint",
    "whole_state",
    "write_sharded",
]

_REST = "meta.pt"  # as Lightning names it


def is_sharded_checkpoint(path: Path) -> bool:
    """Whether it is a folder that this strategy, or Lightning's, wrote."""
    return path.is_dir() and (path / _REST).is_file() and (path / ".metadata").is_file()


def local_part(whole: Tensor, like: DTensor) -> Tensor:
    """What this rank holds of a whole tensor that is laid out as another one of its shape."""
    part, mesh = whole, like.device_mesh
    dims = list(enumerate(like.placements))
    if any(type(placement).__name__ == "_StridedShard" for placement in like.placements):
        dims.reverse()  # tensor parallel first, as FSDP2 cuts
    for index, placement in dims:
        if not placement.is_replicate():
            dim = int(vars(placement)["dim"]) if "dim" in vars(placement) else int(getattr(placement, "dim"))  # noqa: B009
            parts = part.chunk(mesh.size(index), dim)
            rank = mesh.get_local_rank(index)
            part = parts[rank] if rank < len(parts) else part.narrow(dim, 0, 0)
    return part


def copy_weights(module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Load a state dict of whole or of sharded tensors into a module of either.

    Raises:
        MisconfigurationException: Names or shapes do not fit.
    """
    own = module.state_dict()
    _check_names("The checkpoint", state, own, strict)
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


def _check_names(what: str, state: Mapping[str, Any], own: Mapping[str, Any], strict: bool) -> None:
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


def write_sharded(checkpoint: dict[str, Any], folder: Path, rank: int) -> None:
    """Write what ``trainer.save_checkpoint`` gathered; all ranks call it."""
    rest = dict(checkpoint)
    tensors: dict[str, Any] = {"state_dict": rest.pop("state_dict")}
    optimizers = []
    for index, state in enumerate(rest.pop("optimizer_states", [])):
        entries = {str(number): of_one for number, of_one in state["state"].items()}
        tensors[f"optimizer_{index}"] = {
            number: {key: value for key, value in of_one.items() if isinstance(value, Tensor)}
            for number, of_one in entries.items()
        }
        plain = {
            number: {key: value for key, value in of_one.items() if not isinstance(value, Tensor)}
            for number, of_one in entries.items()
        }
        optimizers.append({**state, "state": plain})
    if folder.is_file() and rank == 0:
        folder.unlink()
    dist.barrier()
    folder.mkdir(parents=True, exist_ok=True)
    dcp.save(tensors, checkpoint_id=folder)
    if rank == 0:
        torch.save({**rest, "sharded_optimizers": optimizers}, folder / _REST)


def read_sharded(
    folder: Path, module: nn.Module, optimizers: Sequence[Optimizer], strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Read each rank's part of a sharded checkpoint, however many ranks wrote it; all call it.

    Returns:
        What ``trainer.save_checkpoint`` gathered, with tensors laid out as those of the module and the optimizers.
    """
    rest = torch.load(folder / _REST, map_location="cpu", weights_only=weights_only)
    there = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    own = module.state_dict()
    saved = {k.removeprefix("state_dict."): _Shape(v) for k, v in there.items() if k.startswith("state_dict.")}
    _check_names(f"{folder}", saved, own, strict)
    wanted: dict[str, Any] = {"state_dict": {name: torch.empty_like(own[name]) for name in own if name in saved}}
    states = rest.pop("sharded_optimizers", None)
    if optimizers and states is None:
        raise MisconfigurationException(
            f"{folder} was written by another strategy: its weights can be loaded, its optimizer state cannot. Give it "
            "to trainer.validate, trainer.test or trainer.predict."
        )
    for index, (optimizer, state) in enumerate(zip(optimizers, states or [], strict=False)):
        optimizer_state_here({**state, "state": {}}, optimizer)
        wanted[f"optimizer_{index}"] = _templates(there, f"optimizer_{index}.", optimizer, state["param_groups"])
    dcp.load(wanted, checkpoint_id=folder)
    rest["state_dict"] = wanted["state_dict"]
    rest["optimizer_states"] = [
        {**state, "state": _merged(state["state"], wanted.get(f"optimizer_{index}", {}))}
        for index, state in enumerate(states or [])
    ]
    return rest


class _Shape:
    def __init__(self, stored: Any) -> None:
        self.shape = stored.size if isinstance(stored, TensorStorageMetadata) else torch.Size()


def _templates(there: Mapping[str, Any], prefix: str, optimizer: Optimizer, groups: Any) -> dict[str, Any]:
    """Tensors to read the state of each parameter into, by its number in the checkpoint."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [str(number) for group in groups for number in group["params"]]
    of_number = dict(zip(numbers, parameters, strict=True))
    found: dict[str, Any] = {}
    for name, stored in there.items():
        if name.startswith(prefix) and isinstance(stored, TensorStorageMetadata):
            number, _, key = name.removeprefix(prefix).partition(".")
            parameter, dtype = of_number[number], stored.properties.dtype
            if tuple(stored.size) == tuple(parameter.shape):
                made = torch.zeros_like(parameter.detach(), dtype=dtype)
            else:
                made = torch.zeros(stored.size, dtype=dtype)
            found.setdefault(number, {})[key] = made
    return found


def _merged(plain: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[int, Any]:
    return {int(number): {**entries, **tensors.get(number, {})} for number, entries in plain.items()}


def unshard_checkpoint(folder: str | Path, file: str | Path) -> None:
    """Write a sharded checkpoint as one whole one, that any strategy loads; in one process, without a group.

    Args:
        folder: What ``ModelParallelPlan(save="sharded")`` wrote.
        file: Where the whole one goes.

    Raises:
        MisconfigurationException: The folder is no such checkpoint.
    """
    folder = Path(folder)
    if not is_sharded_checkpoint(folder):
        raise MisconfigurationException(f"{folder} is no sharded checkpoint: a folder with .metadata and meta.pt.")
    rest = torch.load(folder / _REST, map_location="cpu", weights_only=True)
    there = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    flat = {
        name: torch.empty(stored.size, dtype=stored.properties.dtype)
        for name, stored in there.items()
        if isinstance(stored, TensorStorageMetadata)
    }
    dcp.load(flat, checkpoint_id=folder, no_dist=True)
    rest["state_dict"] = {n.removeprefix("state_dict."): v for n, v in flat.items() if n.startswith("state_dict.")}
    states = []
    for index, state in enumerate(rest.pop("sharded_optimizers", [])):
        found: dict[str, Any] = {}
        for name, value in flat.items():
            if name.startswith(prefix := f"optimizer_{index}."):
                number, _, key = name.removeprefix(prefix).partition(".")
                found.setdefault(number, {})[key] = value
        states.append({**state, "state": _merged(state["state"], found)})
    torch.save({**rest, "optimizer_states": states}, file)

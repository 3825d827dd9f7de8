"""Sharded checkpoints: a folder with a file per rank, that loads on any number of ranks, under any plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from lightning_speedkit.parallel.plan_state import check_names, optimizer_state_here

__all__ = ["is_sharded_checkpoint", "read_sharded", "unshard_checkpoint", "write_sharded"]

_REST = "meta.pt"  # as Lightning names it


def is_sharded_checkpoint(path: Path) -> bool:
    """Whether it is a folder that this strategy, or Lightning's, wrote."""
    return path.is_dir() and (path / _REST).is_file() and (path / ".metadata").is_file()


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
    save(tensors, checkpoint_id=folder)
    if rank == 0:
        torch.save({**rest, "sharded_optimizers": optimizers}, folder / _REST)


def read_sharded(
    folder: Path, module: nn.Module, optimizers: Sequence[Optimizer], strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Read each rank's part of a sharded checkpoint, however many ranks wrote it; all call it.

    Returns:
        What ``trainer.save_checkpoint`` gathered, with tensors laid out as those of the module and the optimizers.
    """
    rest: dict[str, Any] = torch.load(folder / _REST, map_location="cpu", weights_only=weights_only)
    there = FileSystemReader(folder).read_metadata().state_dict_metadata
    own = module.state_dict()
    saved = {k.removeprefix("state_dict."): _Shape(v) for k, v in there.items() if k.startswith("state_dict.")}
    check_names(f"{folder}", saved, own, strict)
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
    load(wanted, checkpoint_id=folder)
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
    there = FileSystemReader(folder).read_metadata().state_dict_metadata
    flat = {
        name: torch.empty(stored.size, dtype=stored.properties.dtype)
        for name, stored in there.items()
        if isinstance(stored, TensorStorageMetadata)
    }
    load(flat, checkpoint_id=folder, no_dist=True)
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

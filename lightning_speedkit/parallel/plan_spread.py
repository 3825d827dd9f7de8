"""Spreads a module over the ranks as a plan says, tells how, and takes it back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_speedkit.parallel.plan_mesh import PlanMesh
from lightning_speedkit.parallel.plan_structure import find_tensor_plan
from lightning_speedkit.parallel.plan_tensor import apply_tensor_plan, resolve_plan
from lightning_speedkit.parallel.plan_units import check_parameters, find_units
from lightning_speedkit.parallel.plan_wrap import Undo, checkpoint_forward, shard

__all__ = ["Spread", "same_start"]


@dataclass
class Spread:
    """How one module is spread over ranks, and back.

    Args:
        classes: Of modules to shard as units; ``None`` goes by size.
        min_parameters: By size: the least number of parameters of a unit.
        tensor_plan: Patterns and styles; ``None`` finds them.
        gather_dtype: In which type weights are gathered.
        offload: Whether shards stay on the CPU.
        recompute: Whether units compute their activations again in the backward.
    """

    classes: tuple[str, ...] | None
    min_parameters: int
    tensor_plan: dict[str, str] | None
    gather_dtype: torch.dtype | None
    offload: bool
    recompute: bool

    def __post_init__(self) -> None:
        self._undo: Undo | None = None
        self._module: nn.Module | None = None
        self._divided: dict[str, int] = {}

    @property
    def is_spread(self) -> bool:
        """Whether a module is spread by it now."""
        return self._undo is not None

    def check_left_alone(self) -> None:
        """Refuse arguments that would have no effect on a module that is sharded already.

        Raises:
            MisconfigurationException: It names them.
        """
        names = ("shard_class", "tensor_plan", "gather_precision", "cpu_offload", "checkpoint_activations")
        values = (self.classes, self.tensor_plan, self.gather_dtype, self.offload, self.recompute)
        given = [name for name, value in zip(names, values, strict=True) if value]
        if given:
            raise MisconfigurationException(
                f"configure_model shards the module, so {', '.join(given)} would have no effect. Leave one out."
            )

    def over(self, module: nn.Module, mesh: PlanMesh, device: torch.device) -> tuple[nn.Module, list[str]]:
        """Spread it, in place; returns what is to be called, and what was done, in words.

        Raises:
            MisconfigurationException: The module does not allow it, on all ranks.
        """
        if next(module.parameters(), None) is None:
            raise MisconfigurationException(f"{type(module).__name__} has no parameters to share out.")
        told: list[str] = []
        plan = self._plan_of(module, mesh, told)
        if mesh.shards is not None:
            check_parameters(module)
        units, left = find_units(module, self.classes, self.min_parameters)
        blocks = self._blocks(module, units, told)
        if mesh.shards is None and (self.offload or self.gather_dtype is not None):
            raise MisconfigurationException(
                "cpu_offload and gather_precision are of sharded weights, and with one data parallel rank nothing is "
                "sharded. Leave them out, or use more processes."
            )
        same_start(module, device)
        self._undo, self._module = Undo(module), module
        called: nn.Module = module
        try:
            if mesh.tensor is not None:
                self._divided = apply_tensor_plan(module, plan, mesh.tensor)
            for name in blocks:
                checkpoint_forward(module.get_submodule(name))
            if mesh.shards is not None:
                called = shard(module, units, mesh.shards, self.gather_dtype, self.offload)
                told += _told_of_units(units, left, mesh)
        finally:
            self._undo.release()
        return called, told or ["one process: nothing is shared out"]

    def _plan_of(self, module: nn.Module, mesh: PlanMesh, told: list[str]) -> dict[str, str]:
        if mesh.tensor is None:
            return {}
        ranks = mesh.tensor.size()
        left: dict[str, str] = {}
        if self.tensor_plan is not None:
            plan = resolve_plan(module, self.tensor_plan, ranks)
        else:
            plan, left = find_tensor_plan(module, ranks)
        if not plan:
            why = "; ".join(f"{name!r}: {reason}" for name, reason in left.items())
            raise MisconfigurationException(
                f"tensor_parallel={ranks} finds no layers that it can cut{f' ({why})' if why else ''}. Name them in "
                "tensor_plan, or use data parallel only."
            )
        told.append(f"cut across {ranks} ranks: {', '.join(f'{name} ({style})' for name, style in plan.items())}")
        told.extend(f"left whole: {name}, {reason}" for name, reason in left.items())
        return plan

    def _blocks(self, module: nn.Module, units: list[str], told: list[str]) -> list[str]:
        """The units whose activations are computed again: outer ones, with layers in them, without BatchNorm."""
        if not self.recompute:
            return []
        found: list[str] = []
        for name in units:
            block = module.get_submodule(name)
            outer = any(name.startswith(other + ".") for other in units)
            if outer or not any(True for _ in block.children()):
                continue
            if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in block.modules()):
                told.append(f"activations kept: {name}, its BatchNorm would count each batch twice")
            else:
                found.append(name)
        if not found:
            raise MisconfigurationException(
                "checkpoint_activations=True finds no block: it takes units with layers in them and without BatchNorm. "
                "Name their class in shard_class."
            )
        told.append(f"activations computed again: {', '.join(found)}")
        return found

    def take_back(self, known: bool) -> None:
        """Make it the plain module again; all ranks call it if ``known``."""
        assert self._undo is not None
        assert self._module is not None
        self._undo.take_back(known)
        for name, value in self._divided.items():
            path, _, last = name.rpartition(".")
            setattr(self._module.get_submodule(path), last, value)
        self._undo, self._module, self._divided = None, None, {}


def _told_of_units(units: list[str], left: dict[str, str], mesh: PlanMesh) -> list[str]:
    assert mesh.shards is not None
    copies = f", {mesh.shards.size(0)} copies" if mesh.shards.ndim == 2 else ""
    what = f"units {', '.join(units)}, and the rest as one" if units else "as one unit"
    told = [f"sharded over {mesh.shards.size(-1)} ranks{copies}: {what}"]
    return told + [f"no unit of its own: {name}, {reason}" for name, reason in left.items()]


def same_start(module: nn.Module, device: torch.device) -> None:
    """Give all ranks the weights and buffers of rank 0; values on the meta device are not there yet."""
    for tensor in [*module.parameters(), *module.buffers()]:
        if not tensor.is_meta:
            sent = tensor.detach().to(device).contiguous()
            dist.broadcast(sent, src=0)
            tensor.detach().copy_(sent)

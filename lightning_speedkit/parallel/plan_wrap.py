"""Shards a module in place with FSDP2, and takes all that back: hooks, classes and parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import _composable_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lightning_speedkit.parallel.plan_units import named_uses

__all__ = ["ShardedRoot", "Undo", "checkpoint_forward", "is_sharded", "reshard", "shard", "whole_value"]


def is_sharded(module: nn.Module) -> bool:
    """Whether a parameter is spread over ranks already."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def whole_value(tensor: Tensor) -> Tensor:
    """The whole value on this rank; of a DTensor all its ranks have to ask for it."""
    found: Any = tensor.detach()
    if isinstance(found, DTensor):
        found = found.to(found.device_mesh.device_type)  # an offloaded one meets the others on the device
        found = found.full_tensor()
    assert isinstance(found, Tensor)
    return found


class ShardedRoot(nn.Module):
    """Stands around a model, so that a step of Lightning runs within the hooks of FSDP2, and ``self(x)`` does not."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.forward(*args, **kwargs)


def shard(
    module: nn.Module, units: Iterable[str], mesh: DeviceMesh, parameter_dtype: torch.dtype | None, offload: bool
) -> ShardedRoot:
    """Shard the named modules one by one and the rest together; returns what is to be called.

    Args:
        module: The model; it is changed in place.
        units: Names of modules, inner ones first.
        mesh: One dimension to shard over; or two, of which the first holds copies.
        parameter_dtype: In which type parameters are gathered; gradients are averaged in float32 then.
        offload: Keep shards, gradients and optimizer state on the CPU.
    """
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if parameter_dtype is not None:  # autocast looks after the inputs, so that targets keep their precision
        policy = MixedPrecisionPolicy(parameter_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    offloading = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    root = ShardedRoot(module)
    for part in [*map(module.get_submodule, units), root]:
        if any(True for _ in part.parameters()):
            fully_shard(part, mesh=mesh, mp_policy=policy, offload_policy=offloading)
    return root


def checkpoint_forward(module: nn.Module) -> None:
    """Let a module keep its input instead of its activations, and compute them again in the backward.

    Its class becomes a subclass of the same name, so names and ``isinstance`` stay as they were.
    """
    kind: Any = type(module)
    module.__class__ = _checkpointed(kind)


@functools.cache
def _checkpointed(cls: Any) -> type[nn.Module]:
    class Checkpointed(cls):  # type: ignore[misc]
        @override
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            plain: Callable[..., Any] = super().forward
            if not (self.training and torch.is_grad_enabled()):
                return plain(*args, **kwargs)
            return checkpoint(plain, *args, use_reentrant=False, **kwargs)

    for name in ("__name__", "__qualname__", "__module__"):
        setattr(Checkpointed, name, getattr(cls, name))
    return Checkpointed


def reshard(model: nn.Module | None) -> None:
    """Let no part hold gathered parameters, so that ``parameters()`` are the ones that the optimizer changes."""
    for part in model.modules() if model is not None else ():
        if isinstance(part, FSDPModule):
            part.reshard()


class Undo:
    """Remembers a module as it is, and takes back what torch adds to shard it: attributes, hooks and classes.

    Weights stay what they are at the end: each rank gets them whole, in the parameter objects of before.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = [(m, type(m), set(vars(m)), _hooks(m)) for m in module.modules()]
        self._parameters = list(named_uses(module))
        self._added: list[set[str]] = []

    def release(self) -> None:
        """To call when the module is sharded: the whole weights are no longer held."""
        self._added = [set(vars(module)) - names for module, _, names, _ in self._before]
        now = dict(named_uses(self._module))
        for name, parameter in self._parameters:
            if now[name] is not parameter:
                parameter.data = parameter.data.new_empty(0)

    def take_back(self, known: bool = True) -> None:
        """Make it the plain module again, on the CPU; all ranks call it.

        Args:
            known: Whether the other ranks still answer. If not, what they hold a part of becomes NaN.
        """
        values = {name: _value(parameter, known) for name, parameter in named_uses(self._module)}
        for (module, cls, _, hooks), added in zip(self._before, self._added, strict=True):
            for attribute in added:
                vars(module).pop(attribute, None)
            for attribute, key in _hooks(module) - hooks:
                del vars(module)[attribute][key]
            module.__class__ = cls
            _composable_state._module_state_mapping.pop(module, None)  # else torch refuses to shard it again
        for name, parameter in self._parameters:
            path, _, last = name.rpartition(".")
            parameter.data, parameter.grad = values[name], None
            setattr(self._module.get_submodule(path), last, parameter)
        self._module.to("cpu")


def _value(parameter: Tensor, known: bool) -> Tensor:
    if known or not isinstance(parameter, DTensor):
        return whole_value(parameter).to("cpu", copy=True)
    return torch.full(parameter.shape, float("nan"), dtype=parameter.dtype, device="cpu")


def _hooks(module: nn.Module) -> set[tuple[str, Any]]:
    """Which hooks of torch.distributed a module has; FSDP2 adds some as late as in the first forward."""
    return {
        (name, key)
        for name, hooks in vars(module).items()
        if name.endswith("hooks") and isinstance(hooks, dict)
        for key, hook in hooks.items()
        if str(getattr(getattr(hook, "hook", hook), "__module__", "")).startswith("torch.distributed")
    }

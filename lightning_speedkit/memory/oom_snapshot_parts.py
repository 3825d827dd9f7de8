"""Sorts the tensors that live into parameters, gradients, optimizer state, buffers and the rest.

What it does: counts each storage once, under the first of these that it belongs to; the rest are activations, batches,
and what else the run holds. When it helps: to see what fills a device. What it costs: a look at every object of Python.
Only what Python can see is counted tensor by tensor; what autograd keeps for the backward pass it keeps out of sight,
so that on a device the rest is what the allocator has handed out less what is known.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["LargeTensor", "MemoryParts", "local_tensors", "measure_parts", "place_of_error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeTensor:
    """One of the largest tensors: what it is, of which module, and its bytes."""

    part: str
    name: str
    module: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """Bytes of each part on one device, and the largest tensors there.

    ``activations`` is the rest: on the CPU of the tensors that Python sees, on a device of what is allocated.
    ``fragmentation`` is what the allocator holds and no tensor uses; ``None`` where that is not known.
    """

    device: str
    parameters: int
    gradients: int
    optimizer_state: int
    buffers: int
    activations: int
    fragmentation: int | None
    largest: tuple[LargeTensor, ...] = ()

    @property
    def total(self) -> int:
        """All parts together, without fragmentation."""
        return self.parameters + self.gradients + self.optimizer_state + self.buffers + self.activations


def measure_parts(
    module: nn.Module,
    optimizers: Iterable[torch.optim.Optimizer] = (),
    *,
    device: torch.device | None = None,
    locals_: Mapping[int, tuple[str, str]] | None = None,
    allocated_bytes: int | None = None,
    reserved_bytes: int | None = None,
    largest: int = 10,
) -> MemoryParts:
    """What is in memory of a module's run.

    Args:
        module: Its parameters, gradients and buffers.
        optimizers: Their state.
        device: Where; the CPU if not given.
        locals_: From the ``id`` of a tensor to a name and a module, as :func:`local_tensors` finds them.
        allocated_bytes: In tensors, as the device's allocator says.
        reserved_bytes: From the driver, as it says.
        largest: How many tensors to name.

    >>> layer = nn.Linear(10, 5)
    >>> parts = measure_parts(layer, [torch.optim.Adam(layer.parameters())])
    >>> parts.parameters, parts.gradients, parts.optimizer_state
    (220, 0, 0)
    """
    device = torch.device("cpu") if device is None else device
    seen: dict[int, int] = {}
    sums = dict.fromkeys(("parameters", "gradients", "optimizer_state", "buffers", "activations"), 0)
    named: list[LargeTensor] = []
    everything = (*_of_module(module), *_of_optimizers(module, optimizers), *_others(locals_ or {}))
    for part, name, owner, tensor in everything:
        size = _new_bytes(tensor, device, seen)
        if size:
            sums[part] += size
            shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
            named.append(LargeTensor(part=part, name=name, module=owner, shape=shape, dtype=dtype, bytes=size))
    if allocated_bytes is not None:
        known = sum(sums.values()) - sums["activations"]
        sums["activations"] = max(0, allocated_bytes - known)
    has_both = allocated_bytes is not None and reserved_bytes is not None
    return MemoryParts(
        device=str(device),
        fragmentation=max(0, (reserved_bytes or 0) - (allocated_bytes or 0)) if has_both else None,
        largest=tuple(sorted(named, key=lambda tensor: -tensor.bytes)[:largest]),
        **sums,
    )


def local_tensors(error: BaseException, module: nn.Module) -> dict[int, tuple[str, str]]:
    """The tensors in local variables of the calls that the error went through, with the submodule or function of each.

    They live as long as the error does; here they are known by their ``id`` only.
    """
    found: dict[int, tuple[str, str]] = {}
    names = {id(part): name or type(part).__name__ for name, part in module.named_modules()}
    for frame, _ in _lines(error.__traceback__):
        variables = frame.f_locals
        owner = names.get(id(variables.get("self")), frame.f_code.co_name)
        for name, value in list(variables.items()):
            for tensor in _tensors_in(value):
                found[id(tensor)] = name, owner
    return found


def place_of_error(error: BaseException, module: nn.Module) -> str:
    """Where it was raised: the innermost submodule in its traceback, and the last line of a file outside torch."""
    names = {id(part): name for name, part in module.named_modules()}
    inner, line = "", ""
    for frame, number in _lines(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in names:
            name = names[id(owner)]
            inner = f"{name or type(module).__name__} ({type(owner).__name__}.{frame.f_code.co_name})"
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in ("torch", "lightning"):
            line = f"{frame.f_code.co_filename}:{number}"
    return ", ".join(filter(None, [inner, line]))


def _lines(traceback: TracebackType | None) -> Iterator[tuple[Any, int]]:
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if issubclass(type(value), Tensor):
        yield value
    elif type(value) in (list, tuple) and len(value) <= 64:
        yield from (part for part in value if issubclass(type(part), Tensor))
    elif type(value) is dict and len(value) <= 64:
        yield from (part for part in value.values() if issubclass(type(part), Tensor))


def _of_module(module: nn.Module) -> Iterator[tuple[str, str, str, Tensor]]:
    parameters = dict(module.named_parameters())
    for name, parameter in parameters.items():
        yield "parameters", name, name.rpartition(".")[0], parameter
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            yield "gradients", name, name.rpartition(".")[0], parameter.grad
    for name, buffer in module.named_buffers():
        yield "buffers", name, name.rpartition(".")[0], buffer


def _of_optimizers(
    module: nn.Module, optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[tuple[str, str, str, Tensor]]:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            name = names.get(id(parameter), "?")
            for key, value in state.items() if isinstance(state, Mapping) else ():
                if isinstance(value, Tensor):
                    yield "optimizer_state", f"{key} of {name}", name.rpartition(".")[0], value


def _others(locals_: Mapping[int, tuple[str, str]]) -> Iterator[tuple[str, str, str, Tensor]]:
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    # Those that have a name first: a storage is told once.
    for tensor in sorted(tensors, key=lambda tensor: id(tensor) not in locals_):
        name, module = locals_.get(id(tensor), ("", ""))
        made = type(tensor.grad_fn).__name__ if tensor.grad_fn is not None else ""
        yield "activations", name or (f"from {made}" if made else "a tensor"), module, tensor


def _new_bytes(tensor: Tensor, device: torch.device, seen: dict[int, int]) -> int:
    """The bytes of its storages that were not seen before."""
    inner: Sequence[Tensor] = [tensor]
    if hasattr(tensor, "__tensor_flatten__"):  # made of others, as a quantized state or a shard is
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    size = 0
    for part in inner:
        try:
            storage = part.untyped_storage()
            place, key = part.device, storage.data_ptr()
        except (RuntimeError, ValueError, NotImplementedError):  # sparse, lazy, or of a transform
            continue
        same = place.type == device.type and device.index in (None, place.index)
        if same and key and key not in seen:
            seen[key] = storage.nbytes()
            size += storage.nbytes()
    return size

"""A copy of a module and a batch to try a training step on, of fake tensors or of real ones."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode, unset_fake_temporarily
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

from lightning_speedkit.memory.host_random import read_host_random, write_host_random

__all__ = [
    "Copied",
    "Precision",
    "batch_for",
    "checked_device",
    "checked_precision",
    "copy_for",
    "distinct_bytes",
    "leaves_no_trace",
]


@dataclass(frozen=True, slots=True)
class Precision:
    """The type that weights are converted to, and the one that autocast computes in; ``None`` for neither."""

    weights: torch.dtype | None = None
    autocast: torch.dtype | None = None


_PRECISIONS = {
    "32-true": Precision(),
    "bf16-mixed": Precision(autocast=torch.bfloat16),
    "16-mixed": Precision(autocast=torch.float16),
    "bf16-true": Precision(weights=torch.bfloat16),
    "16-true": Precision(weights=torch.float16),
    "64-true": Precision(weights=torch.float64),
}


def checked_precision(name: str) -> Precision:
    """What a Lightning precision means.

    >>> checked_precision("bf16-true").weights
    torch.bfloat16
    """
    if name not in _PRECISIONS:
        raise ValueError(f"precision={name!r} is not one of {', '.join(map(repr, _PRECISIONS))}.")
    return _PRECISIONS[name]


def checked_device(device: str | torch.device) -> torch.device:
    """The device, if torch finds it: without it, fake tensors cannot be on it either, and autocast is off.

    >>> checked_device("cpu")
    device(type='cpu')
    """
    place = torch.device(device)
    found = torch.accelerator.current_accelerator(check_available=True)
    if place.type != "cpu" and (found is None or place.type != found.type):
        raise ValueError(f"device={str(place)!r}: torch finds no such device here. Estimate with device='cpu'.")
    return place


@dataclass(frozen=True, slots=True)
class Copied:
    """A copy of a module, and the mode under which it runs."""

    module: nn.Module
    mode: AbstractContextManager[Any]
    fake: bool


def copy_for(module: nn.Module, precision: Precision, device: torch.device, fake: bool) -> Copied:
    """A copy of the module in that precision on that device. What is checkpointed stays so; logging does nothing."""
    lazy = [name for name, parameter in module.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ValueError(f"The parameter {lazy[0]!r} has no shape before the first forward. Run one batch, then ask.")
    mode: Any = FakeTensorMode(allow_non_fake_inputs=True) if fake else contextlib.nullcontext()
    making: Any = FakeCopyMode(mode) if fake else contextlib.nullcontext()
    with making:
        twin = copy.deepcopy(module, _left_out(module))
    # A deep copy is of the plain classes.
    for own, copied in zip(module.modules(), twin.modules(), strict=True):
        copied.__class__ = own.__class__
    with mode, torch.no_grad():
        _move(twin, precision.weights, device)
    for name in ("log", "log_dict"):
        if hasattr(twin, name):
            setattr(twin, name, lambda *_, **__: None)
    return Copied(twin, mode, fake)


def _move(module: nn.Module, dtype: torch.dtype | None, device: torch.device) -> None:
    """As ``module.to(device, dtype)``, which refuses fake tensors. No gradients are left."""
    moved: dict[int, Any] = {}  # a tied parameter stays one
    replaced: list[Any] = []  # held, so that no address comes twice
    for owner in module.modules():
        for registered in (owner._parameters, owner._buffers):
            for name, value in registered.items():
                if value is None:
                    continue
                if id(value) not in moved:
                    replaced.append(value)
                    to = value.detach().to(device=device, dtype=dtype if value.is_floating_point() else None)
                    moved[id(value)] = nn.Parameter(to, value.requires_grad) if registered is owner._parameters else to
                registered[name] = moved[id(value)]


def _left_out(module: nn.Module) -> dict[int, Any]:
    """Of a LightningModule in a run, the trainer is not copied."""
    try:
        trainer = module.trainer
    except (AttributeError, RuntimeError):
        return {}
    return {id(trainer): None}


def batch_for(batch: Any, precision: Precision, device: torch.device, copied: Copied) -> Any:
    """The batch as the copy takes it. A tensor that comes twice is one."""
    seen: dict[int, Tensor] = {}

    def send(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in seen:
            own = copied.mode.from_tensor(leaf.detach()) if copied.fake else leaf.detach()  # type: ignore[attr-defined]
            dtype = precision.weights if own.is_floating_point() else None
            seen[id(leaf)] = own.to(device=device, dtype=dtype)
        return seen[id(leaf)]

    return tree_map(send, batch)


def distinct_bytes(tensors: Iterable[Tensor] | Any) -> int:
    """Bytes of the storages of tensors, also nested ones; each storage once.

    >>> x = torch.zeros(256)
    >>> distinct_bytes([x, {"view": x[:2]}, torch.zeros(2)])
    1032
    """
    found = tensors if isinstance(tensors, (Tensor, dict, list, tuple)) else list(tensors)
    storages = {}
    for tensor in tree_leaves(found):
        if isinstance(tensor, Tensor):
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


@contextlib.contextmanager
def leaves_no_trace() -> Iterator[None]:
    """Gradients are on inside; the random state of torch, Python and numpy is put back after.

    Among fake tensors the state of torch's generator would be a fake too, and recomputation would set it; so inside,
    reading and setting it step out of them.
    """
    host, read, write = read_host_random(), torch.get_rng_state, torch.set_rng_state

    def set_state(new_state: Tensor) -> None:
        with unset_fake_temporarily():
            write(new_state)

    def get_state() -> Tensor:
        with unset_fake_temporarily():
            return read()

    with torch.random.fork_rng(), torch.enable_grad():
        torch.get_rng_state, torch.set_rng_state = get_state, set_state
        try:
            yield
        finally:
            torch.get_rng_state, torch.set_rng_state = read, write
            write_host_random(host)

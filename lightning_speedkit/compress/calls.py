"""Records how a network is called, whatever its batches look like, so that it can be called the same way again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torchmetrics import Metric

__all__ = [
    "Call",
    "batch_size",
    "call_with",
    "first_sample",
    "inside_metrics",
    "record_calls",
    "replay",
    "used_modules",
]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the module ``name`` (``""`` is the root) with these arguments."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@contextmanager
def record_calls(root: nn.Module, *, include_root: bool = True) -> Iterator[list[Call]]:
    """Fills the list with the outermost calls made inside the block of modules of ``root`` that have parameters.

    If a step calls ``self(x)``, that is the call of the root; if it calls ``self.encoder(x)`` and then
    ``self.decoder(z)``, those are the two calls. Losses have no parameters and are not recorded, nor are metrics.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> with record_calls(net) as calls:
    ...     _ = net(torch.ones(1, 2))
    ...     _ = net[0](torch.ones(4, 2))
    >>> [(call.name, tuple(call.args[0].shape)) for call in calls]
    [('', (1, 2)), ('0', (4, 2))]
    """
    calls: list[Call] = []
    depth = 0

    def enter(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal depth
            if depth == 0:
                calls.append(Call(name, _cloned(args), _cloned(kwargs)))
            depth += 1

        return hook

    def leave(*_: Any) -> None:
        nonlocal depth
        depth -= 1

    handles = []
    metrics = inside_metrics(root)
    for name, module in root.named_modules():
        if next(module.parameters(), None) is not None and name not in metrics and (name or include_root):
            handles.append(module.register_forward_pre_hook(enter(name), with_kwargs=True))
            handles.append(module.register_forward_hook(leave, with_kwargs=True, always_call=True))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def inside_metrics(root: nn.Module) -> set[str]:
    """The names of all metrics in ``root`` and of the modules inside them, such as the network of an FID."""
    return {
        f"{name}.{inner}".rstrip(".")
        for name, metric in root.named_modules()
        if isinstance(metric, Metric)
        for inner, _ in metric.named_modules()
    }


def used_modules(root: nn.Module, calls: Sequence[Call]) -> dict[str, Call]:
    """Every module that runs when ``calls`` are replayed, with the arguments of its first call if it has parameters."""
    used: dict[str, Call] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name not in used:
                keep = next(module.parameters(), None) is not None
                used[name] = Call(name, _cloned(args), _cloned(kwargs)) if keep else Call(name, (), {})

        return hook

    handles = [m.register_forward_pre_hook(note(name), with_kwargs=True) for name, m in root.named_modules()]
    try:
        replay(root, calls)
    finally:
        for handle in handles:
            handle.remove()
    return used


def replay(root: nn.Module, calls: Sequence[Call]) -> list[Tensor]:
    """The floating-point tensors that ``root`` answers ``calls`` with, drawing the same random numbers each time."""
    outputs: list[Tensor] = []
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for call in calls:
            torch.default_generator.manual_seed(0)  # torch.manual_seed would reach the accelerators too
            result = call_with(root.get_submodule(call.name), call)
            outputs.extend(tensor for tensor in _tensors(result) if tensor.is_floating_point())
    return outputs


def call_with(module: nn.Module, call: Call) -> Any:
    """``module`` called with copies of the recorded arguments, so that a model may write into its input."""
    return module(*_cloned(call.args), **_cloned(call.kwargs))


def batch_size(call: Call) -> int:
    """The length of the first dimension of the first tensor argument, or 1."""
    return next((len(tensor) for tensor in _tensors((call.args, dict(call.kwargs))) if tensor.ndim > 0), 1)


def first_sample(call: Call) -> Call:
    """The same call with only the first of its batch; tensors of another length are passed whole."""
    size = batch_size(call)

    def first(tensor: Tensor) -> Tensor:
        return tensor[:1] if tensor.ndim > 0 and len(tensor) == size else tensor

    return Call(
        call.name,
        cast("tuple[Any, ...]", apply_to_collection(call.args, Tensor, first, allow_frozen=True)),
        cast("dict[str, Any]", apply_to_collection(dict(call.kwargs), Tensor, first, allow_frozen=True)),
    )


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts: Iterable[Any] = ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, (list, tuple)):
        parts = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = (getattr(value, field.name) for field in dataclasses.fields(value))
    return [tensor for part in parts for tensor in _tensors(part)]


def _cloned(value: Any) -> Any:
    return apply_to_collection(value, Tensor, lambda tensor: tensor.detach().clone(), allow_frozen=True)

"""Says of a leak what grows, who holds it, and what to do.

What it does: picks the cause among the things that grow, which come in crowds: a tensor kept in a list is one more
tensor, one more entry, and some more objects. When it helps: a slope alone says that there is a leak, not where. What
it costs: walks through what the module reaches, once per leak.
"""

from __future__ import annotations

import dataclasses
import gc
import io
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_speedkit.memory.leak_monitor_census import Grown, kind_of_tensor
from lightning_speedkit.memory.leak_monitor_owner import find_object, find_path, find_tensors, newest_of
from lightning_speedkit.report import format_number

__all__ = ["Leak", "name_leak", "size_text"]

_REMEDIES = {
    "graph": "Detach what is carried from one step to the next, as in `state = state.detach()`.",
    "attached": "Each keeps the graph and the activations of its step: keep `loss.detach()` or `loss.item()` instead.",
    "hooks": "Register the hook once, or call `remove()` on the handle that registering returned.",
    "metric": "Call `reset()` on the metric when an epoch ends, or give the metric itself to `self.log`.",
    "cache": "Give the cache a `maxsize`, or keys that come back.",
    "garbage": "The objects refer to each other in a circle, so that only the collector frees them.",
    "files": "Close the files, best with `with open(...)`.",
    "kept": "Clear it when it is not needed any more, or keep numbers in place of tensors.",
    "unnamed": "No Python object accounts for it: look at libraries outside of Python, and at workers.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """Memory that grows without end.

    ``kind`` is ``"graph"``, ``"hooks"``, ``"container"``, ``"tensors"``, ``"cache"``, ``"garbage"``, ``"objects"`` or
    ``"unnamed"``; ``what`` grows, ``owner`` is how it is reached, ``""`` if unknown; ``where`` is ``"host"`` or the
    device. ``bytes_per_step`` is the measured slope, or an estimate from the objects where that is too small to see;
    ``site`` is the line that allocates, if allocations were traced.
    """

    kind: str
    what: str
    owner: str = ""
    where: str = "host"
    bytes_per_step: float = 0.0
    per_step: float = 0.0
    first_step: int = 0
    last_step: int = 0
    remedy: str = ""
    site: str = ""
    grown: Grown | None = None

    @property
    def identity(self) -> str:
        """What two reports of one leak share."""
        return self.owner or f"{self.kind} {self.what}"

    def describe(self) -> str:
        """For a person.

        >>> leak = Leak(kind="container", what="tensors", owner="Net.kept", bytes_per_step=2048.0, per_step=1.0)
        >>> leak.describe()
        'Net.kept: 1.00 more tensors per step, about 2.00 KiB per step on the host from step 0 to 0.'
        """
        who = f"{self.owner}: " if self.owner else ""
        what = f"{format_number(self.per_step)} more {self.what} per step, " if self.per_step else ""
        text = (
            f"{who}{what}about {size_text(self.bytes_per_step)} per step on the {self.where} "
            f"from step {self.first_step} to {self.last_step}."
        )
        return " ".join(filter(None, [text, f"Allocated in {self.site}." if self.site else "", self.remedy]))


def size_text(count: float) -> str:
    """Bytes as people read them.

    >>> size_text(1536), size_text(3 * 2**30)
    ('1.50 KiB', '3.00 GiB')
    """
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    number = float(count)
    while abs(number) >= 1024 and len(units) > 1:
        number /= 1024
        units.pop(0)
    return format_number(number, units[0])


def name_leak(
    grown: Sequence[Grown],
    roots: Mapping[str, Any],
    slopes: Sequence[float],
    device: torch.device,
    steps: Sequence[int],
    known: Collection[str] = (),
) -> Leak | None:
    """The leak behind things that grow, or ``None`` if it is known already.

    Args:
        grown: From :func:`grown_between`; empty for memory that nothing accounts for.
        roots: Names, and the objects behind them.
        slopes: Measured bytes per step, of the host and of the device; 0 for none. What is measured goes before what
            the objects seem to take.
        device: Of the second.
        steps: Of the counts.
        known: The :attr:`Leak.identity` of those that were told already.
    """
    on_host, on_device = slopes
    cause = _choose(grown, roots, known) if grown else _Cause("unnamed", "memory", None, 0.0, remedy="unnamed")
    if cause is None:
        return None
    return Leak(
        kind=cause.kind,
        what=cause.what,
        owner=cause.owner,
        where=str(device) if on_device else "host",
        bytes_per_step=on_device or on_host or cause.bytes_per_step,
        per_step=0.0 if cause.grown is None else cause.grown.per_step,
        first_step=steps[0],
        last_step=steps[-1],
        remedy=_REMEDIES[cause.remedy],
        grown=cause.grown,
    )


@dataclass(frozen=True)
class _Cause:
    kind: str
    what: str
    grown: Grown | None
    bytes_per_step: float
    owner: str = ""
    remedy: str = "kept"


def _choose(grown: Sequence[Grown], roots: Mapping[str, Any], known: Collection[str]) -> _Cause | None:
    by_kind: dict[str, list[Grown]] = {}
    for one in grown:
        by_kind.setdefault(one.kind, []).append(one)
    whole = sum(one.bytes_per_step for one in grown)

    def owner(things: list[Any]) -> str:
        return (find_path(roots, map(id, things)) or "").rstrip("0123456789[]")

    for one in by_kind.get("graph", []):
        things = find_tensors(one.key, kind_of_tensor)
        return _Cause("graph", "operations in the graph of one tensor", one, whole, owner(things), "graph")
    for one in by_kind.get("cache", []):
        return _Cause("cache", f"entries in {one.name}", one, whole, "", "cache")
    containers = by_kind.get("container", [])
    found = [(one, find_object(roots, [one.key])) for one in containers[:8]]
    for one, place in found:
        if place is not None and place[0] not in known:
            return _container(one, *place, roots, whole)
    if any(place is not None for _, place in found):
        return None  # the rest may be what these hold
    for one in by_kind.get("tensors", []):
        remedy = "attached" if " from " in one.key else "kept"
        return _Cause("tensors", one.name, one, whole, owner(find_tensors(one.key, kind_of_tensor)), remedy)
    for one in by_kind.get("garbage", []):
        return _Cause("garbage", one.name, one, whole, "", "garbage")
    for one in by_kind.get("objects", []):
        remedy = "files" if issubclass(one.key, io.IOBase) else "kept"
        return _Cause("objects", one.name, one, whole, owner(newest_of(one.key)), remedy)
    return _Cause("container", "entries in a container", containers[0], whole) if containers else None


def _container(grown: Grown, path: str, container: Any, roots: Mapping[str, Any], whole: float) -> _Cause:
    values = list(container.values() if isinstance(container, dict) else container)[-8:]
    sizes = sum(_size_of(value) for value in values) / max(1, len(values))
    names = {_name_of(value) for value in values}
    what = f"entries ({names.pop()})" if len(names) == 1 else "entries"
    remedy, kind = "kept", "container"
    if path.rpartition(".")[2].endswith(("_hooks", "_hooks_with_kwargs")):
        remedy, kind = "hooks", "hooks"
    elif any(isinstance(value, Tensor) and value.grad_fn is not None for value in values):
        remedy = "attached"
    elif any(isinstance(value, io.IOBase) for value in values):
        remedy = "files"
    elif _belongs_to_metric(container, roots):
        remedy = "metric"
    bytes_per_step = grown.per_step * (8 + sizes)
    holds_objects = any(gc.is_tracked(value) for value in values)
    bytes_per_step = max(bytes_per_step, whole) if holds_objects else bytes_per_step
    return _Cause(kind, what, dataclasses.replace(grown, kind=kind), bytes_per_step, path, remedy)


def _size_of(value: Any) -> float:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size() + 512
    if isinstance(value, (list, tuple)):
        return sys.getsizeof(value) + sum(_size_of(part) for part in value[:16] if not isinstance(part, (list, tuple)))
    return sys.getsizeof(value)  # of an array with its numbers


def _name_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return kind_of_tensor(value) or "Tensor"
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return f"{name} {dtype} {list(shape)}" if isinstance(shape, tuple) else name


def _belongs_to_metric(container: Any, roots: Mapping[str, Any]) -> bool:
    models = (root for root in roots.values() if isinstance(root, torch.nn.Module))
    metrics = (part for model in models for part in model.modules() if isinstance(part, Metric))
    return any(value is container for metric in metrics for value in list(vars(metric).values()))

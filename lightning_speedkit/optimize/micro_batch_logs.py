"""The values that a step logs, held back until it has succeeded, and put together where it ran in pieces."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

__all__ = ["RecordedLogs", "joined_logs"]

_SIGNATURE = inspect.signature(LightningModule.log)


class RecordedLogs:
    """Keeps the calls of ``LightningModule.log``.

    >>> logs = RecordedLogs()
    >>> logs.record(("loss", torch.tensor(0.5)), {"prog_bar": True})
    >>> logs.replay(lambda *call, **options: print(*call, options))
    loss tensor(0.5000) {'prog_bar': True}
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any, dict[str, Any]]] = []  # name, value, the other arguments by name

    def record(self, arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
        """Keep a call with these arguments, with its value as it is now."""
        given = _SIGNATURE.bind(None, *arguments, **options).arguments
        value = given["value"]
        if isinstance(value, Tensor) and not given.get("enable_graph"):
            value = value.detach().clone()
        others = {key: given[key] for key in given if key not in ("self", "name", "value")}
        self.calls.append((given["name"], value, others))

    def replay(self, log: Callable[..., None]) -> None:
        """Make the calls."""
        for name, value, options in self.calls:
            log(name, value, **options)


def joined_logs(
    pieces: Sequence[RecordedLogs], sizes: Sequence[int], weights: Sequence[float | Tensor] | None = None
) -> RecordedLogs:
    """What the whole batch would have logged, from what its pieces logged.

    A value is the weighted mean over the pieces that logged it, or their sum, largest or smallest one if ``reduce_fx``
    says so. A metric object has seen all pieces and is logged once. ``batch_size`` is summed up.

    Args:
        pieces: The calls of each piece.
        sizes: The number of samples of each piece.
        weights: What the pieces weigh in means, numbers or tensors of no dimension; ``None``: their samples. One of 0
            is passed over, since its mean may be no number.

    >>> pieces = [RecordedLogs(), RecordedLogs()]
    >>> pieces[0].record(("loss", 1.0), {})
    >>> pieces[1].record(("loss", 5.0), {})
    >>> joined_logs(pieces, sizes=[3, 1]).calls
    [('loss', tensor(2.), {})]
    """
    found: dict[str, list[tuple[Any, float | Tensor, dict[str, Any]]]] = {}
    for piece, weight in zip(pieces, sizes if weights is None else weights, strict=True):
        for name, value, options in piece.calls:
            found.setdefault(name, []).append((value, weight, options))
    joined = RecordedLogs()
    for name, entries in found.items():
        values, shares, named = [e[0] for e in entries], [e[1] for e in entries], dict(entries[0][2])
        if named.get("batch_size") is not None:
            named["batch_size"] = sum(entry[2].get("batch_size") or 0 for entry in entries)
        joined.calls.append((name, _joined(values, shares, named.get("reduce_fx", "mean")), named))
    return joined


def _joined(values: list[Any], shares: list[float | Tensor], reduce_fx: Any) -> Any:
    if not isinstance(values[0], (Tensor, int, float)):
        return values[0]
    stacked = torch.stack([torch.as_tensor(value) for value in values])
    kind = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
    if kind in ("sum", "max", "min", "amax", "amin"):
        return getattr(stacked, {"max": "amax", "min": "amin"}.get(kind, kind))(0)
    if not stacked.is_floating_point():
        stacked = stacked.to(torch.get_default_dtype())
    double = torch.float32 if stacked.device.type == "mps" else torch.float64
    weights = torch.stack([torch.as_tensor(share, dtype=double, device=stacked.device) for share in shares])
    weights = (weights / weights.sum()).to(stacked.dtype).reshape(-1, *[1] * (stacked.ndim - 1))
    return (stacked * weights).where(weights != 0, 0.0).sum(0)

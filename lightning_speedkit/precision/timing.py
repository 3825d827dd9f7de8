"""Which precision a device runs fastest, by a short measurement in place of a table.

What it does: a stack of matrix products and a stack of convolutions run forward and backward under each precision, in
turns, so that a machine that slows down slows all of them. When it helps: on a device that the table of
:func:`~lightning_speedkit.precision.fastest_precision` does not know, or to check it. What it costs: some seconds, and
the memory of the two stacks. What it does not tell: how fast *your* model is, whose layers may be smaller, nor what a
loss scaler costs; for that, time some steps of it.

Source: the interleaved design is that of any paired comparison; measured are medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_speedkit.measure.hardware import read_hardware

__all__ = ["PrecisionTiming", "measure_precision"]

_DTYPES = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_MARGIN = 0.95  # 16 bits must take at most this part of float32's time: less is within what timings vary by
_LEAST_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionTiming:
    """What :func:`measure_precision` found.

    ``seconds`` is the median time of one forward and backward pass under each precision, in the order asked for;
    ``fastest`` is the best of them, where ``"32-true"`` wins unless another takes at least 5 % less time.
    """

    device: str
    rounds: int
    seconds: Mapping[str, float]
    fastest: str


def measure_precision(
    accelerator: str = "auto", candidates: Sequence[str] | None = None, seconds: float = 2.0
) -> PrecisionTiming:
    """Times matrix products and convolutions under each precision on the device, and says which is fastest.

    No random number of the caller is drawn, no setting of torch is changed, and ``"32-true"`` is measured as torch is
    set: with TF32 where that is on.

    Args:
        accelerator: ``"auto"``, ``"cpu"``, ``"gpu"``, ``"cuda"``, ``"mps"`` or ``"xpu"``.
        candidates: Of ``"32-true"``, ``"bf16-mixed"`` and ``"16-mixed"``; all of them if not given, but
            ``"16-mixed"`` on a CPU, which few CPUs compute natively.
        seconds: About how long to measure, above 0; each candidate runs three times at least, after one warm-up.

    Raises:
        ValueError: The accelerator is unknown or not here, a candidate is unknown or named twice, there is none, or
            ``seconds`` is not above 0.
        TypeError: ``candidates`` is one string, or ``seconds`` no number.

    >>> timing = measure_precision("cpu", candidates=["32-true"], seconds=0.01)
    >>> timing.fastest, timing.rounds >= 3, timing.seconds["32-true"] > 0
    ('32-true', True, True)
    """
    device = torch.device(read_hardware(accelerator).accelerator)
    names = _checked_candidates(candidates, device.type)
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(f"seconds={seconds!r} must be a number above 0; got {type(seconds).__name__}.")
    if not 0 < seconds < float("inf"):
        raise ValueError(f"seconds={seconds!r} must be a number above 0.")
    load = _Load(device)
    for name in names:  # the first run of each chooses kernels and allocates
        load.seconds_under(name)
    taken: dict[str, list[float]] = {name: [] for name in names}
    end, rounds = time.perf_counter() + seconds, 0
    while rounds < _LEAST_ROUNDS or time.perf_counter() < end:
        for name in names if rounds % 2 == 0 else reversed(names):
            taken[name].append(load.seconds_under(name))
        rounds += 1
    medians = {name: statistics.median(times) for name, times in taken.items()}
    return PrecisionTiming(device=device.type, rounds=rounds, seconds=medians, fastest=_fastest_of(medians))


def _fastest_of(seconds: Mapping[str, float]) -> str:
    """The name with the least time; float32 unless another is clearly faster.

    >>> _fastest_of({"32-true": 1.0, "bf16-mixed": 0.97}), _fastest_of({"32-true": 1.0, "bf16-mixed": 0.6})
    ('32-true', 'bf16-mixed')
    """
    best = min(seconds, key=lambda name: seconds[name])
    full = seconds.get("32-true")
    return best if full is None or seconds[best] <= _MARGIN * full else "32-true"


def _checked_candidates(candidates: Sequence[str] | None, device_type: str) -> tuple[str, ...]:
    if candidates is None:
        return tuple(name for name in _DTYPES if not (name == "16-mixed" and device_type == "cpu"))
    known = ", ".join(map(repr, _DTYPES))
    if isinstance(candidates, str):
        raise TypeError(f"candidates={candidates!r} must be a list of precisions, of {known}.")
    names = tuple(candidates)
    if unknown := [name for name in names if name not in _DTYPES]:
        raise ValueError(f"candidates: {unknown[0]!r} cannot be measured; use some of {known}.")
    if not names or len(set(names)) < len(names):
        raise ValueError(f"candidates={list(names)!r} must name one or more of {known}, each once.")
    return names


class _Load:
    """The work that is timed, of a size that the device is busy with and not only its launches."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        width, rows, channels, images = (256, 256, 32, 4) if device.type == "cpu" else (2048, 4096, 128, 64)
        draw = torch.Generator().manual_seed(0)
        self.weights = [self._made(draw, width, width) for _ in range(3)]
        self.kernels = [self._made(draw, channels, channels, 3, 3) for _ in range(3)]
        self.rows = self._made(draw, rows, width)
        self.images = self._made(draw, images, channels, 32, 32)

    def seconds_under(self, name: str) -> float:
        """The time of one forward and backward pass of both stacks."""
        dtype = _DTYPES[name]
        low = dtype is not torch.float32
        context: Any = torch.autocast(self.device.type, dtype, cache_enabled=False) if low else nullcontext()
        self._wait()
        start = time.perf_counter()
        with torch.enable_grad():
            with context:
                rows, images = self.rows, self.images
                for weight in self.weights:
                    rows = nn.functional.linear(rows, weight)
                for kernel in self.kernels:
                    images = nn.functional.conv2d(images, kernel, padding=1)
            torch.autograd.grad(rows.float().sum() + images.float().sum(), [*self.weights, *self.kernels])
        self._wait()
        return time.perf_counter() - start

    def _made(self, draw: torch.Generator, *shape: int) -> Tensor:
        values = torch.randn(shape, generator=draw, dtype=torch.float32, device="cpu") / shape[-1]
        return values.to(self.device).requires_grad_()

    def _wait(self) -> None:
        if self.device.type != "cpu":
            getattr(torch, self.device.type).synchronize()

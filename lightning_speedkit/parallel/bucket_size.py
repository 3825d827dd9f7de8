"""How many gradients to send together under DDP, from the size of the model and the speed of the link.

What it does: gradients are sent in buckets while the backward goes on. Each bucket costs the latency of the link
once, so there should be few; the last one is sent when the backward is over, so it should be small. With ``G`` bytes
of gradients, a latency of ``a`` seconds and ``b`` seconds per byte, buckets of ``s`` bytes cost ``a G / s + b s``,
which is least at ``s = sqrt(a G / b)``.

When it helps: a link on which torch's 25 MiB are far off. What it costs: a few collectives at the start of ``fit``.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import torch

__all__ = ["measure_link", "suggest_bucket_mb"]

_SMALL, _LARGE, _TIMES = 1024, 4 << 20, 5  # bytes, and how often each is sent


def suggest_bucket_mb(gradient_bytes: int, latency_seconds: float, seconds_per_byte: float) -> float:
    """The size of a bucket in MiB: at least 1, and at most all gradients.

    Args:
        gradient_bytes: What is sent in a step.
        latency_seconds: What a collective takes that sends nearly nothing.
        seconds_per_byte: What each byte adds.

    Raises:
        ValueError: One of them is negative or not finite.

    Example:

        >>> suggest_bucket_mb(400 << 20, latency_seconds=50e-6, seconds_per_byte=1e-10)  # 10 GB/s
        13.81...
    """
    for name, value in (
        ("gradient_bytes", gradient_bytes),
        ("latency_seconds", latency_seconds),
        ("seconds_per_byte", seconds_per_byte),
    ):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name}={value!r} must be 0 or more, and finite.")
    most = max(1.0, gradient_bytes / (1 << 20))
    if seconds_per_byte == 0:
        return most
    best = math.sqrt(latency_seconds * gradient_bytes / seconds_per_byte) / (1 << 20)
    return min(max(1.0, best), most)


def measure_link(device: torch.device, group: Any = None) -> tuple[float, float]:
    """The latency of a collective in seconds, and the seconds that each byte adds. All ranks have to call it.

    All ranks get the same numbers, those of the slowest one. It sends 20 MiB.
    """
    times = [_median_seconds(size, device, group) for size in (_SMALL, _LARGE)]
    slowest = torch.tensor(times, dtype=torch.float64).to(device, torch.float32)
    torch.distributed.all_reduce(slowest, torch.distributed.ReduceOp.MAX, group=group)
    small, large = slowest.tolist()
    return small, max(0.0, large - small) / (_LARGE - _SMALL)


def _median_seconds(size: int, device: torch.device, group: Any) -> float:
    buffer, seconds = torch.zeros(size // 4, device=device), []
    for _ in range(_TIMES + 1):
        torch.distributed.barrier(group)
        start = time.perf_counter()
        torch.distributed.all_reduce(buffer, group=group)
        buffer[0].item()  # waits for the device
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])

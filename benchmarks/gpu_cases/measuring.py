"""Seconds of a call and bytes of a device, for the cases."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from benchmarks.gpu_cases.case_run import CaseRun

__all__ = ["compare", "median_seconds", "peak_bytes", "relative_difference", "tensor_bytes", "wait"]

_LEAST, _MOST = 3, 30  # rounds


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(
    calls: Mapping[str, Callable[[], object]], device: torch.device, budget_seconds: float, warmup: int = 2
) -> dict[str, float]:
    """The median seconds of each call, taken in turns, forwards and backwards, so that a slower machine slows all.

    The device has nothing to do before a call and has done all of it after, so launching is in it. There are three
    rounds at least, whatever the budget.
    """
    for call in calls.values():
        for _ in range(warmup):
            call()
    wait(device)
    taken: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + budget_seconds
    for number in range(_MOST):
        if number >= _LEAST and time.perf_counter() > end:
            break
        for name in calls if number % 2 == 0 else reversed(list(calls)):
            start = time.perf_counter()
            calls[name]()
            wait(device)
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in taken.items()}


def compare(
    run: CaseRun, calls: Mapping[str, Callable[[], object]], share: float = 0.8, warmup: int = 2
) -> dict[str, float]:
    """Tells the milliseconds of each call, and how many times as fast as the first one each other one is.

    ``share`` is the part of the case's budget that it may take.
    """
    seconds = median_seconds(calls, run.device, run.budget_seconds * share, run.pick(1, warmup))
    base = next(iter(seconds.values()))
    for name, value in seconds.items():
        run.number(f"{name} ms", value * 1e3)
        if name != next(iter(seconds)):
            run.number(f"{name} x", base / value)
    return seconds


def peak_bytes(device: torch.device, call: Callable[[], object]) -> int:
    """What the CUDA allocator gave out at most during the call, beyond what was in use before; 0 on a CPU."""
    if device.type != "cuda":
        call()
        return 0
    gc.collect()
    wait(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    wait(device)
    return torch.cuda.max_memory_allocated(device) - before


def relative_difference(found: Tensor, wanted: Tensor) -> float:
    """``|found - wanted| / |wanted|`` by Euclidean norms in float32, on the CPU; infinite if something is not finite.

    >>> relative_difference(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]))
    0.10000000149011612
    """
    a, b = found.detach().float().cpu(), wanted.detach().float().cpu()
    return float(((a - b).norm() / b.norm()).nan_to_num(torch.inf))


def tensor_bytes(module: nn.Module) -> int:
    """Bytes of all parameters and buffers, each counted once; of what a tensor subclass wraps, where it is one.

    >>> tensor_bytes(nn.Linear(3, 2))
    32
    """
    kept = {id(value): value.detach() for value in (*module.parameters(), *module.buffers())}
    return sum(_bytes(value) for value in kept.values())


def _bytes(value: Tensor) -> int:
    flatten = getattr(value, "__tensor_flatten__", None)
    if flatten is None:
        return value.nbytes
    parts = [getattr(value, name) for name in flatten()[0]]
    return sum(_bytes(part) for part in parts if part is not None)

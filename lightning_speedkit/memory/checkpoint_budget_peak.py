"""The most bytes that a step holds at once, by the record of the allocator that gives them out.

On a CUDA device it is the allocator's own count. On a CPU it is the record that torch's profiler keeps of what the
allocator gives out and takes back, which has the buffers inside kernels too, such as oneDNN's own layouts of a
convolution's tensors: it holds none for 1x1 convolutions, and fills up channels to a width that the processor decides.
Where a profiler is on already, of which there can be one, and on other devices, living storages are counted instead;
then the buffers of convolutions on a CPU are reckoned from the sizes of their tensors.

The gradient of a parameter counts until it has been accumulated. What it costs: on a CPU a little time for each
operation of a step; where storages are counted, work in Python for each operation.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _autograd, _profiler
from torch.profiler import record_function

from lightning_speedkit.memory.checkpoint_budget_live import LiveBytes, at_each_gradient, storage_of

__all__ = ["measure_peak_bytes"]

_MARK = "speedkit gradients: "
_config: Callable[..., Any] = _profiler.ProfilerConfig
# on the CPU; no shapes; memory; no stacks, no counts of operations, no modules
_CPU_MEMORY: tuple[Any, ...] = _profiler.ProfilerState.CPU, False, True, False, False, False


def measure_peak_bytes(model: nn.Module, run: Callable[[], Any], device: torch.device) -> int:
    """The most bytes that a run holds at once beyond what was there, gradients of parameters left out.

    >>> layer, x = nn.Linear(8, 256), torch.ones(16, 8)
    >>> measure_peak_bytes(layer, lambda: layer(x).tanh().tanh(), torch.device("cpu"))  # two are held at once
    32768
    """
    gc.collect()  # or tensors in cycles from before, freed during the run, lower what the allocator tells
    if device.type == "cuda":
        return _peak_of_cuda(model, run, device)
    if device.type == "cpu" and not _autograd._profiler_enabled() and (recorded := _peak_of_record(model, run)):
        return recorded
    live = LiveBytes(trial=True)
    with at_each_gradient(model, live.leave_out), live:
        run()
    return live.peak


def _peak_of_record(model: nn.Module, run: Callable[[], Any]) -> int:
    left_out, known = 0, _storages_of_gradients(model)
    references: list[Any] = []

    def mark(change: int) -> None:
        nonlocal left_out
        left_out += change
        with record_function(f"{_MARK}{left_out}"):
            pass

    def leave_out(gradient: Tensor) -> None:
        storage = storage_of(gradient)
        if storage is None or storage._cdata in known:
            return
        key, nbytes = storage._cdata, storage.nbytes()
        known.add(key)

        def gone(_: Any) -> None:
            known.discard(key)
            mark(-nbytes)

        references.append(weakref.ref(storage, gone))
        mark(nbytes)

    # The profiler before Kineto: it keeps the order, and writes nothing to the terminal.
    _autograd._enable_profiler_legacy(_config(*_CPU_MEMORY, _profiler._ExperimentalConfig()))
    try:
        with at_each_gradient(model, leave_out):
            run()
        references.clear()  # so that none is called later
    finally:
        threads = _autograd._disable_profiler_legacy()
    return max(map(_peak_of_events, threads), default=0)


def _peak_of_events(events: Sequence[Any]) -> int:
    """Of what the profiler recorded: bytes given out and taken back, and marks of how many are left out."""
    now = peak = left_out = 0
    for event in events:
        if event.kind() == "memory_alloc":
            now += event.cpu_memory_usage()
            peak = max(peak, now - left_out)
        elif event.kind() == "push" and event.name().startswith(_MARK):
            left_out = int(event.name().removeprefix(_MARK))
    return peak


def _peak_of_cuda(model: nn.Module, run: Callable[[], Any], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    base, gradients, peak = torch.cuda.memory_allocated(device), 0, 0
    known = _storages_of_gradients(model)

    def note(gradient: Tensor | None = None) -> None:
        nonlocal gradients, peak
        peak = max(peak, torch.cuda.max_memory_allocated(device) - base - gradients)
        torch.cuda.reset_peak_memory_stats(device)
        storage = None if gradient is None else storage_of(gradient)
        if storage is not None and storage._cdata not in known:
            known.add(storage._cdata)
            gradients += storage.nbytes()

    torch.cuda.reset_peak_memory_stats(device)
    with at_each_gradient(model, note):
        run()
    note()
    return peak


def _storages_of_gradients(model: nn.Module) -> set[int]:
    """Of gradients that are there before, which are no part of what a run holds."""
    gradients = (parameter.grad for parameter in model.parameters() if parameter.grad is not None)
    return {storage._cdata for gradient in gradients if (storage := storage_of(gradient)) is not None}

"""Running out of memory on purpose: under a cap on the allocator, or, on a CPU, by a layer that raises."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.gpu_cases.case_run import CaseRun
from benchmarks.gpu_cases.models import Net, fit
from lightning_speedkit.measure.out_of_memory import is_out_of_memory, out_of_memory_source, release_memory
from lightning_speedkit.memory.batch_size import BatchSizeSearch
from lightning_speedkit.memory.oom_snapshot import OOMSnapshot
from lightning_speedkit.optimize import AutoMicroBatch

__all__ = ["batch_size_search", "micro_batch", "recognized", "snapshot"]

_MIB = 2**20


@contextmanager
def capped(run: CaseRun, more_bytes: int) -> Iterator[None]:
    """The process may take so much more memory of the device than it holds now; nothing on a CPU."""
    if not run.is_cuda:
        yield
        return
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + more_bytes) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


class Most(nn.Module):
    """Hands its input on; on a CPU it has memory for so many rows only."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and len(x) > self.rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate: this is a test.")
        return x


def recognized(run: CaseRun) -> None:
    """Errors of the real allocator: told from others by the kit, after which the device goes on working."""
    x = torch.ones(64, 64, device=run.device)
    errors: dict[str, BaseException] = {}
    with capped(run, 256 * _MIB):
        for name, call in {
            "allocation": lambda: torch.empty(2**30, device=run.device),
            "product": lambda: torch.ones(20_000, 8, device=run.device) @ torch.ones(8, 20_000, device=run.device),
            "more than there is": lambda: torch.empty(2**50, dtype=torch.uint8, device=run.device),
        }.items():
            try:
                call()
            except Exception as error:  # which one is what is asked
                errors[name] = error.with_traceback(None)
            run.check(f"{name}: raises", name in errors)
        held = [torch.empty(_MIB, dtype=torch.uint8, device=run.device) for _ in range(128)]
        before = torch.cuda.memory_reserved()
        held.clear()
        release_memory(run.device)
        run.number("given back MiB", (before - torch.cuda.memory_reserved()) / _MIB)
        run.check("release_memory gives memory back", torch.cuda.memory_reserved() < before)
    for name, error in errors.items():
        run.check(f"{name}: recognized", is_out_of_memory(error), f"{type(error).__name__}: {str(error)[:200]}")
        run.check(f"{name}: of CUDA", out_of_memory_source(error) == "CUDA", str(out_of_memory_source(error)))
    with torch.no_grad():
        run.check("the device goes on", bool((x @ x).eq(64).all()))
    try:
        torch.ones(2, device=run.device) @ torch.ones(3, device=run.device)
    except RuntimeError as error:
        run.check("another error is none", not is_out_of_memory(error))


def _deep(run: CaseRun, most: int) -> nn.Sequential:
    """Layers whose activations, 8 KiB for a row and layer, are what fills the memory."""
    torch.manual_seed(0)
    width = run.pick(8, 1024)
    layers = [layer for _ in range(8) for layer in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(Most(most), *layers)


def _sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.5)


def micro_batch(run: CaseRun) -> None:
    """Batches of 16384 rows where a third of one fits: computed in pieces, with the losses and weights of the whole."""
    rows, steps = run.pick(8, 16384), run.pick(2, 4)
    x = torch.randn(steps * rows, run.pick(8, 1024), generator=torch.Generator().manual_seed(2))
    net, data = _deep(run, rows // 3), TensorDataset(x)
    whole = Net(copy.deepcopy(net), _sgd)
    whole.net[0].rows = rows
    fit(run, whole, data, rows)
    peak = torch.cuda.max_memory_allocated() if run.is_cuda else 0
    run.number("whole batch peak MiB", peak / _MIB)
    wanted = [p.detach().cpu() for p in whole.net.parameters()]
    losses = torch.stack(whole.losses).cpu()
    del whole
    callback, module = AutoMicroBatch(), Net(net, _sgd)
    with capped(run, peak // 2):
        fit(run, module, data, rows, callbacks=[callback])
    size = callback.micro_batch_size
    run.check("computed in pieces", size is not None and size < rows, f"{size} rows at once of {rows}")
    run.number("rows at once", size or rows)
    error = max(
        float((a.detach().cpu() - b).norm() / b.norm()) for a, b in zip(module.net.parameters(), wanted, strict=True)
    )
    run.check("weights of whole batches", error < 1e-4, f"relative difference {error:.2g}")
    apart = float((torch.stack(module.losses).cpu() - losses).abs().max() / losses.abs().max())
    run.check("losses of whole batches", apart < 1e-4, f"relative difference {apart:.2g}")


def batch_size_search(run: CaseRun) -> None:
    """The largest batch under a cap of about 700 MiB: a size that was tried, and the next one does not fit."""
    limit, width = run.pick(16, 32768), run.pick(8, 1024)
    data = TensorDataset(torch.zeros(1, 1).expand(limit, width))
    search = BatchSizeSearch(start=run.pick(2, 512), limit=limit)
    module = Net(_deep(run, 11), _sgd)
    with capped(run, 700 * _MIB):
        fit(run, module, data, 4, callbacks=[search], limit_train_batches=2)
    size = search.batch_size or 0
    tried = {trial.size: trial.fits for trial in search.trials}
    run.number("found rows", size)
    run.number("trials", len(tried))
    run.check("a size that was tried and fits", tried.get(size, False), str(tried))
    run.check("the next one does not fit", tried.get(size + 1) is False, str(tried))
    if not run.is_cuda:
        run.check("the size is known here", size == 11, str(size))
        return
    peaks = [trial.peak_bytes or 0 for trial in search.trials if trial.size == size]
    run.number("peak MiB", max(peaks, default=0) / _MIB)


def snapshot(run: CaseRun) -> None:
    """A fit that runs out of memory: the error goes on, and two files say what filled the memory."""
    rows = run.pick(8, 65536)
    net = _deep(run, rows // 2)
    module = Net(net, _sgd)
    data = TensorDataset(torch.zeros(1, 1).expand(rows, run.pick(8, 1024)))
    error: BaseException | None = None
    with TemporaryDirectory() as folder:
        callback = OOMSnapshot(folder=folder, history_entries=run.pick(0, 1000))
        with capped(run, 1024 * _MIB):
            try:
                fit(run, module, data, rows, callbacks=[callback])
            except Exception as caught:  # which one is what is asked
                error = caught
        files = sorted(path.name for path in Path(folder).iterdir())
    run.check("the error goes on", error is not None and is_out_of_memory(error), repr(error)[:200])
    run.check("files", {"out-of-memory-rank0.txt", "out-of-memory-rank0.json"} <= {*files}, str(files))
    told = callback.snapshot
    if told is None:
        run.check("there is a snapshot", False)
        return
    weights = sum(p.numel() * p.element_size() for p in module.parameters())
    run.check("bytes of parameters", told.parts.parameters == weights, f"{told.parts.parameters}, really {weights}")
    run.check("a remedy is named", bool(told.remedies), str([one.preset for one in told.remedies]))
    run.note(told.text().splitlines()[0])
    if run.is_cuda:
        run.number("activations MiB", told.parts.activations / _MIB)
        run.check("activations fill it", told.parts.activations > told.parts.total / 2, str(told.parts.total))
        run.check("history of the allocator", "out-of-memory-rank0.pickle" in files, str(files))

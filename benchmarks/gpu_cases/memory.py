"""What memory will be needed, against what the device gave out; and memory that grows."""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu_cases.case_run import CaseRun
from benchmarks.gpu_cases.models import Net, fit, images, net_and_rows, resnet, tokens, transformer
from lightning_speedkit.memory.cache_release import CacheRelease, release_cache
from lightning_speedkit.memory.leak_monitor import LeakMonitor
from lightning_speedkit.memory.memory_estimate import estimate_memory
from lightning_speedkit.memory.peak_memory import PeakMemory

__all__ = ["estimate", "leak_monitor", "peaks"]

_MIB = 2**20


def estimate(run: CaseRun) -> None:
    """The predicted peak of a step with AdamW within 10 % of the measured one."""
    kinds = (
        *(("transformer", precision) for precision in ("32-true", "bf16-mixed", "bf16-true")),
        *(("resnet50", precision) for precision in ("32-true", "bf16-mixed")),
    )
    for name, precision in kinds[: run.pick(2, None)]:
        gc.collect()
        before = torch.cuda.memory_allocated() if run.is_cuda else 0
        model, x = (transformer(run), tokens(run)) if name == "transformer" else (resnet(run), images(run)[0])
        told = estimate_memory(model, x, precision)
        run.number(f"{name} {precision} told MiB", told.peak_bytes / _MIB)
        weights = sum(p.numel() for p in model.parameters()) * (2 if precision == "bf16-true" else 4)
        run.check(f"{name} {precision}: weights", told.parameters == weights, f"{told.parameters}, really {weights}")
        if precision == "bf16-true":
            model, x = model.bfloat16(), x.bfloat16()
        if run.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        _two_steps(run, model, x, precision)
        if run.is_cuda:
            measured = torch.cuda.max_memory_allocated() - before
            ratio = told.peak_bytes / measured
            run.number(f"{name} {precision} told/measured x", ratio)
            run.check(
                f"{name} {precision}: within 10 %", 0.9 <= ratio <= 1.1, f"{told.peak_bytes} told, {measured} measured"
            )
        del model, x


def _two_steps(run: CaseRun, model: nn.Module, x: Tensor, precision: str) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    low = precision == "bf16-mixed"
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast(run.device.type, torch.bfloat16) if low else contextlib.nullcontext():
            loss = model(x).float().mean()
        loss.backward()
        optimizer.step()


class _Keeps(Net):
    """Keeps a tensor of each batch, on its device."""

    def __init__(self, net: nn.Module, what: str) -> None:
        super().__init__(net)
        self.what = what
        self.kept: list[Tensor] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.what == "tensors":
            self.kept.append(batch[0].repeat(64, 1))


def leak_monitor(run: CaseRun) -> None:
    """A run that keeps a tensor of each batch on the device is found; the same run without that is not."""
    steps = run.pick(320, 320)
    for what, wanted in (("tensors", True), ("nothing", False))[: run.pick(1, None)]:
        net, data = net_and_rows(run, steps, rows=4, width=64)
        monitor = LeakMonitor()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit(run, _Keeps(net, what), data, 4, callbacks=[monitor])
        told = "; ".join(leak.describe() for leak in monitor.leaks)
        run.check(f"keeps {what}", bool(monitor.leaks) == wanted, told or "no leak")
        if wanted and monitor.leaks:
            leak = monitor.leaks[0]
            run.note(told)
            run.number("leak KiB/step", leak.bytes_per_step / 1024)
            run.check("its owner is named", "kept" in leak.owner, leak.owner)
            if run.is_cuda:
                run.check("it is on the device", leak.where != "host", leak.where)


def peaks(run: CaseRun) -> None:
    """The peak of a fit as the allocator has it; the same losses with both callbacks; a cache that is given back."""
    net, data = net_and_rows(run, steps=10, rows=run.pick(4, 2048))
    rows = run.pick(4, 2048)
    plain, watched = Net(copy.deepcopy(net)), Net(copy.deepcopy(net))
    fit(run, plain, data, rows)
    peak, release = PeakMemory(), CacheRelease()
    fit(run, watched, data, rows, callbacks=[peak, release])
    same = all(bool(a.eq(b)) for a, b in zip(watched.losses, plain.losses, strict=True))
    run.check("losses as without them", same)
    run.check("there is a peak of training", "train" in peak.peaks, str([*peak.peaks]))
    told = peak.peaks["train"].device_bytes
    if run.is_cuda:
        allocated = torch.cuda.max_memory_allocated()  # since training began, when the callback has set it back
        run.check("the allocator's own peak", told is not None and told == allocated, f"{told}, {allocated}")
        run.number("peak MiB", (told or 0) / _MIB)
        torch.empty(64 * _MIB, dtype=torch.uint8, device=run.device)  # freed at once, and kept by the allocator
        given = release_cache(run.device)
        run.number("given back MiB", given / _MIB)
        run.check("the cache is given back", given >= 64 * _MIB, f"{given} bytes")

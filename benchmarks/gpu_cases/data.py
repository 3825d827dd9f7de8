"""Batches on their way to the device: pinned rings, copies ahead on a stream of their own, transforms on the device."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.gpu_cases.case_run import CaseRun
from benchmarks.gpu_cases.measuring import compare, wait
from lightning_speedkit.data import (
    CutMix,
    DevicePrefetcher,
    DeviceTransform,
    LMDBDataset,
    MixUp,
    Normalize,
    RandomCrop,
    RandomErase,
    RandomFlip,
    RingLoader,
    write_lmdb,
)

__all__ = ["prefetch", "transforms"]


def prefetch(run: CaseRun) -> None:
    """An epoch from a store with work on each batch: batches arrive whole, and copies overlap with it."""
    size, count, rows = run.pick((8, 12, 4), (224, 1024, 64))
    draw = torch.Generator().manual_seed(0)
    with TemporaryDirectory() as folder:
        samples = ((torch.randint(256, (3, size, size), generator=draw, dtype=torch.uint8), i) for i in range(count))
        dataset = LMDBDataset(write_lmdb(samples, Path(folder, "images.lmdb")))
        ring: Any = RingLoader(dataset, batch_size=rows, workers="threads", pin_memory=run.is_cuda)
        wanted = [int(images.sum(dtype=torch.int64)) for images, _ in ring]
        work = _work(run)
        loaders: dict[str, Iterable[Any]] = {
            "torch": DataLoader(
                dataset,
                rows,
                num_workers=run.pick(0, min(4, os.cpu_count() or 1)),
                pin_memory=run.is_cuda,
                persistent_workers=not run.tiny,
            ),
            "ring": ring,
            "prefetch": DevicePrefetcher(ring, run.device),
        }
        if run.is_cuda:
            first = next(iter(ring))
            run.check("batches of the ring are page-locked", first[0].is_pinned())
            run.check("it copies to the device", next(iter(loaders["prefetch"]))[0].is_cuda)
        for name, loader in loaders.items():
            found, _ = _epoch(run, loader, work)
            run.check(f"{name}: every batch is whole", found == wanted, f"{len(found)} batches")
        kept = [batch[0] for batch in ring]  # the slots of the ring are not used again
        _epoch(run, loaders["prefetch"], work)
        run.check("kept batches do not change", [int(x.sum(dtype=torch.int64)) for x in kept] == wanted)
        del kept
        seconds: dict[str, list[float]] = {name: [] for name in loaders}
        end = time.perf_counter() + run.budget_seconds / 2
        for number in range(run.pick(1, 5)):
            if number and time.perf_counter() > end:
                break
            for name in loaders if number % 2 == 0 else reversed(loaders):
                seconds[name].append(_epoch(run, loaders[name], work)[1])
        for name, taken in seconds.items():
            run.number(f"{name} images/s", count / min(taken))
        run.number("the work alone ms", 1e3 * _alone(run, work, len(wanted)))
        ring.close()


def _work(run: CaseRun) -> Callable[[], object]:
    size = run.pick(8, 4096)
    a = torch.ones(size, size, device=run.device, dtype=torch.bfloat16)

    def work() -> None:
        for _ in range(8):
            torch.mm(a, a)

    return work


def _epoch(run: CaseRun, loader: Iterable[Any], work: Callable[[], object]) -> tuple[list[int], float]:
    wait(run.device)
    start = time.perf_counter()
    sums: list[Tensor] = []
    for images, _ in loader:
        images = images.to(run.device, non_blocking=True)
        work()
        sums.append(images.sum(dtype=torch.int64))
        del images
    wait(run.device)
    taken = time.perf_counter() - start
    return [int(each) for each in sums], taken


def _alone(run: CaseRun, work: Callable[[], object], batches: int) -> float:
    wait(run.device)
    start = time.perf_counter()
    for _ in range(batches):
        work()
    wait(run.device)
    return time.perf_counter() - start


def transforms(run: CaseRun) -> None:
    """Augmentation of a batch of 256 images: the same for the same seed, and normalized as on the CPU."""
    rows, size = run.pick((4, 16), (256, 224))
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(256, (rows, 3, size, size), generator=draw, dtype=torch.uint8)
    batch = x.to(run.device), torch.randint(10, (rows,), generator=draw).to(run.device)
    normalize = Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    augment = DeviceTransform([RandomCrop(size, padding=size // 8), RandomFlip(), RandomErase()], [normalize])
    mixing = DeviceTransform([RandomFlip(), CutMix(classes=10), MixUp(classes=10)], [normalize])
    for name, transform in (("augment", augment), ("mix", mixing)):
        one, again, other = (transform(batch, training=True, seed=seed) for seed in ((1, 2), (1, 2), (1, 3)))
        same = all(bool(a.eq(b).all()) for a, b in zip(one, again, strict=True))
        run.check(f"{name}: the same for one seed", same)
        run.check(f"{name}: another for another seed", not bool(one[0].eq(other[0]).all()))
        run.check(f"{name}: finite, of the same shape", one[0].shape == x.shape and bool(one[0].isfinite().all()))
    evaluated = augment(batch, training=False, seed=(0,))[0].cpu()
    error = float((evaluated - normalize(x)).abs().max())
    run.check("normalized as on the CPU", error < 1e-5, f"{error:.2g} apart")
    state = torch.get_rng_state(), torch.cuda.get_rng_state() if run.is_cuda else torch.zeros(1)
    mixing(batch, training=True, seed=(1,))
    after = torch.get_rng_state(), torch.cuda.get_rng_state() if run.is_cuda else torch.zeros(1)
    run.check(
        "no random number of the run is drawn", all(bool(a.eq(b).all()) for a, b in zip(state, after, strict=True))
    )
    calls = {
        "normalize": lambda: augment(batch, training=False, seed=(0,)),
        "augment": lambda: augment(batch, training=True, seed=(1,)),
        "mix": lambda: mixing(batch, training=True, seed=(1,)),
    }
    for name, seconds in compare(run, calls, 0.4).items():
        run.number(f"{name} images/s", rows / seconds)

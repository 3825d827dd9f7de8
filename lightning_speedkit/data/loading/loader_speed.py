"""How fast a loader is, in its first pass and when all is in memory, and what bounds it.

The first pass reads from the disk what is not in the page cache, and computes the checksum of each block of a store.
The same batches again, in the same order, come from memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lightning_speedkit.data.argument_checks import check_seconds
from lightning_speedkit.data.loading.worker_choice import cpu_count
from lightning_speedkit.data.settings.trial_measurement import bytes_of
from lightning_speedkit.measure.samples import count_samples

__all__ = ["Bound", "LoaderPass", "LoaderSpeed", "first_pass_bound", "measure_loader", "what_bounds"]

_SHARE_OF_COPY = 0.5  # above it, copying is what takes the time
_SLOWED = 0.7  # of the rate without it: what lies between takes the time
_MOST = 0.5  # of the first pass: what takes it is what there is to say
_DISK = 2.0  # times its speed, or a part of it, are still the disk's: the probe and the loader read differently
_SHARE_OF_MEMORY = 0.8
_MOST_WORKERS = 16  # that a RingLoader takes by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderPass:
    """What came out of a loader in how many seconds. ``bytes`` are those of the tensors and byte strings handed out.

    The time begins before the iterator is made. ``seconds_start`` of it passed before the first batch: workers start
    then, and make batches ahead.
    """

    batches: int
    samples: int
    bytes: int
    seconds: float
    seconds_start: float = 0.0

    @property
    def samples_per_second(self) -> float:
        """0 if nothing was read."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_second(self) -> float:
        """0 if nothing was read."""
        return self.bytes / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSpeed:
    """``first`` is the first pass, or its part that fitted in the time; ``warm`` the fastest of the same batches.

    ``ahead`` is how many batches the loader makes at most before they are asked for: as few say nothing of its speed.
    """

    first: LoaderPass
    warm: LoaderPass
    ahead: int = 1


@dataclass(frozen=True, slots=True)
class Bound:
    """What a loader spends its time on, and what to do about it."""

    name: str
    advice: str


def measure_loader(loader: Iterable[Any], *, seconds: float = 3.0) -> LoaderSpeed:
    """Go through a loader once, for at most ``seconds`` from the first batch on, and then through the same batches
    again and again, as long.

    Of the later passes the fastest counts: what other programs took away is not the loader's. A loader with
    ``set_epoch`` begins each pass in epoch 0, so that its order is the same one.

    Raises:
        TypeError: ``seconds`` is no number.
        ValueError: ``seconds`` is not above 0, or the loader has no batch.

    >>> import torch
    >>> speed = measure_loader([torch.zeros(8, 3), torch.zeros(4, 3)], seconds=0.01)
    >>> speed.first.samples, speed.first.bytes
    (12, 144)
    """
    check_seconds("seconds", seconds)
    first = _pass(loader, None, seconds)
    if first is None:
        raise ValueError(f"{type(loader).__name__} has no batch to measure.")
    warm: LoaderPass | None = None
    end = time.perf_counter() + seconds
    while warm is None or time.perf_counter() < end:
        again = _pass(loader, first.batches, seconds)
        if again is not None and (warm is None or again.samples_per_second > warm.samples_per_second):
            warm = again
    return LoaderSpeed(first=first, warm=warm, ahead=_ahead(loader))


def what_bounds(
    warm: LoaderPass,
    *,
    copy_bytes_per_second: float,
    plain: LoaderPass | None = None,
    decoded: LoaderPass | None = None,
    work: str = "",
    python: bool = True,
    store_bytes: int = 0,
    memory_bytes: int = 0,
) -> Bound:
    """What bounds a loader from the second epoch on.

    Args:
        warm: The loader with all it does.
        copy_bytes_per_second: What one core can copy, see :func:`~lightning_speedkit.measure.memory_copy`.
        plain: The same store without decoding and transform, if there are any.
        decoded: With decoding and without the transform, if there are both: what takes more of the time is named.
        work: What ``plain`` is without, if that is one of them: ``"decoding"`` or ``"transform"``.
        python: Whether samples pass through Python one by one, which those of one size and type do not.
        store_bytes: Size of the store.
        memory_bytes: Memory of the machine; 0 where it is not known.

    >>> slow = LoaderPass(batches=1, samples=100, bytes=1000, seconds=1.0)
    >>> what_bounds(slow, copy_bytes_per_second=1e9).name
    'Python code per sample'
    """
    if memory_bytes and store_bytes > _SHARE_OF_MEMORY * memory_bytes:
        return _DISK_READS
    if plain is not None and warm.samples_per_second < _SLOWED * plain.samples_per_second:
        if decoded is not None:
            decoding = _sample_seconds(decoded) - _sample_seconds(plain)
            work = "decoding" if decoding >= _sample_seconds(warm) - _sample_seconds(decoded) else "transform"
        return _DECODING if work == "decoding" else _TRANSFORM
    if warm.bytes_per_second >= _SHARE_OF_COPY * copy_bytes_per_second:
        return _COPY
    if python:
        return _PYTHON_FOR_A_TRANSFORM if work == "transform" or decoded is not None else _PYTHON
    return _HANDING_OUT


_DISK_READS = Bound(
    "the disk",
    "The store does not fit in memory, so each epoch reads it anew. Put it on a local NVMe disk (stage_to_local), or "
    "store less per sample.",
)
_DECODING = Bound(
    "decoding on the CPU",
    "Store the pictures at about the size that is trained on, or give it more cores. Where neither simplejpeg nor "
    "OpenCV is installed: pip install 'lightning-speedkit[images]'.",
)
_TRANSFORM = Bound(
    "the Python transform",
    "Do it for whole batches on the device (DeviceTransform), once while packing, or with more workers.",
)
_COPY = Bound(
    "memory copy",
    "More workers gain little. Fewer bytes per sample do: uint8 instead of float32, or a smaller size.",
)
_PYTHON_FOR_A_TRANSFORM = Bound(
    "Python code per sample",
    "The transform does little itself, but with one each sample passes through Python: do it for whole batches on the "
    "device (DeviceTransform), or once while packing.",
)
_PYTHON = Bound(
    "Python code per sample",
    "Samples of one size and type are copied without Python: pad or resize them while packing, and leave out what is "
    "not trained on. Pictures are decoded without it by an ImageField.",
)
_HANDING_OUT = Bound(
    "handing out batches",
    "A larger batch costs less per sample. If other programs use the cores, measure again without them.",
)


def first_pass_bound(speed: LoaderSpeed, *, disk_bytes_per_second: float | None) -> str:
    """What bounds the first epoch, in a few words.

    >>> one = LoaderPass(batches=9, samples=10, bytes=1000, seconds=1.0)
    >>> first_pass_bound(LoaderSpeed(first=one, warm=one, ahead=4), disk_bytes_per_second=None)
    'as fast as the later ones'
    >>> first_pass_bound(LoaderSpeed(first=one, warm=one, ahead=16), disk_bytes_per_second=None)
    'too few batches to tell'
    """
    if speed.first.batches <= speed.ahead:
        return "too few batches to tell"
    if _SLOWED * speed.first.samples_per_second > speed.warm.samples_per_second:
        return "faster than the later ones, which other programs may have slowed: measure again"
    if speed.first.samples_per_second >= _SLOWED * speed.warm.samples_per_second:
        return "as fast as the later ones"
    if speed.first.seconds_start > _MOST * speed.first.seconds:
        return f"slower than the later ones: {_told(speed.first.seconds_start)} s until the first batch, to start"
    if disk_bytes_per_second is None:
        return "slower than the later ones: reading from the disk, and the checksum of each block"
    if disk_bytes_per_second / _DISK <= speed.first.bytes_per_second <= _DISK * disk_bytes_per_second:
        return "as fast as the disk"
    return "slower than the later ones by page faults and the checksum of each block, once per process"


def _pass(loader: Iterable[Any], batches: int | None, seconds: float) -> LoaderPass | None:
    """One pass of so many batches; or the first one, for that time and that of its start."""
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(0)
    count = samples = size = 0
    begin = time.perf_counter()
    seconds_start = 0.0
    for batch in loader:
        count += 1
        samples += count_samples(batch)
        size += bytes_of(batch)
        if count == 1:
            seconds_start = time.perf_counter() - begin
        if count == batches or (batches is None and time.perf_counter() - begin - seconds_start >= seconds):
            break
    if count == 0:
        return None
    elapsed = max(time.perf_counter() - begin, 1e-9)
    samples = _told_samples(loader, count) or samples
    return LoaderPass(batches=count, samples=samples, bytes=size, seconds=elapsed, seconds_start=seconds_start)


def _told_samples(loader: Any, batches: int) -> int | None:
    """The samples of the first batches of a loader that has a batch size and reads a known number of samples.

    A batch itself does not tell if it holds text, samples of different sizes, or nothing at all.
    """
    size = getattr(loader, "batch_size", None)
    samples: Any = getattr(loader, "sampler", getattr(loader, "dataset", None))
    ranks = getattr(getattr(loader, "order", None), "world_size", 1)
    if not isinstance(size, int) or not hasattr(samples, "__len__") or ranks > 1:
        return None
    return min(batches * size, len(samples))


def _ahead(loader: Any) -> int:
    """How many batches a loader makes ahead, at most; 1 for one that does not say."""
    factor, workers = getattr(loader, "prefetch_factor", None), getattr(loader, "num_workers", 0)
    if factor is None or workers == 0:
        return 1
    return max(2, int(factor) * int(min(cpu_count(), _MOST_WORKERS) if workers is None else workers))


def _sample_seconds(read: LoaderPass) -> float:
    return read.seconds / max(1, read.samples)


def _told(seconds: float) -> str:
    return f"{seconds:.2g}" if seconds < 10 else f"{seconds:,.0f}"

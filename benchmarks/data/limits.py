"""What the machine could do: copying shuffled rows into memory that is used again and again, and bare decoding.

The copy is the fastest of ``numpy.take``, ``torch.index_select`` and, if numba is installed, a compiled loop of
``memcpy``, on one thread, or on two that share each epoch's batches. Destination and map are touched beforehand.
Nothing is collated and nothing is handed to another thread: no loader can do less on that core.

Decoding is simplejpeg and a resize to 224, called in a plain loop in two threads, each of which writes into a buffer of
its own.
"""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.data.datasets import SIZE, Data
from benchmarks.data.measuring import Batches

__all__ = ["coarse_decoding", "copying", "decoding", "shuffled_batches"]

_Copy = Callable[[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]], None]
_Decode = Callable[[bytes, NDArray[np.uint8]], None]
_TRIED = 32  # batches


def shuffled_batches(data: Data, epoch: int) -> list[NDArray[np.int64]]:
    """The numbers of the samples of each batch."""
    order = np.random.default_rng(epoch).permutation(data.samples)
    return [order[start : start + data.batch] for start in range(0, data.samples, data.batch)]


@contextmanager
def copying(data: Data, workers: int) -> Iterator[Batches]:
    """Rows out of the mapped file into a buffer per thread."""
    rows = data.rows().reshape(data.samples, -1).view(np.int64)
    labels = np.array([data.label(number) for number in range(data.samples)])
    copy = _fastest_copy(rows, shuffled_batches(data, 0))

    def make() -> Callable[[NDArray[np.int64]], Any]:
        buffer = np.ones((data.batch, rows.shape[1]), dtype=np.int64)

        def fill(numbers: NDArray[np.int64]) -> Any:
            copy(rows, numbers, buffer)
            return buffer[: len(numbers)].view(data.dtype).reshape(-1, *data.shape), labels[numbers]

        return fill

    with _threads(data, max(workers, 1), make) as epoch:
        yield epoch


@contextmanager
def decoding(data: Data, workers: int) -> Iterator[Batches]:
    """JPEG files in memory into a buffer per thread, decoded and resized to 224 with an antialiasing filter."""
    with _decoded(data, workers, _antialiased()) as epoch:
        yield epoch


@contextmanager
def coarse_decoding(data: Data, workers: int) -> Iterator[Batches]:
    """The same with the fastest settings there are, whose pictures are other ones."""
    with _decoded(data, workers, _plain()) as epoch:
        yield epoch


@contextmanager
def _decoded(data: Data, workers: int, decode: _Decode) -> Iterator[Batches]:
    jpegs = data.jpegs()

    def make() -> Callable[[NDArray[np.int64]], Any]:
        buffer = np.ones((data.batch, SIZE, SIZE, 3), dtype=np.uint8)

        def fill(numbers: NDArray[np.int64]) -> Any:
            for row, number in zip(buffer, numbers.tolist(), strict=False):
                decode(jpegs[number], row)
            return buffer[: len(numbers)].transpose(0, 3, 1, 2), numbers

        return fill

    with _threads(data, max(workers, 1), make) as epoch:
        yield epoch


@contextmanager
def _threads(data: Data, workers: int, make: Callable[[], Callable[[NDArray[np.int64]], Any]]) -> Iterator[Batches]:
    """With one worker batches are made where they are asked for, with more by as many threads, in any order."""
    if workers == 1:
        fill = make()
        yield lambda number: map(fill, shuffled_batches(data, number))
        return
    local = threading.local()

    def share(batches: list[NDArray[np.int64]]) -> list[Any]:
        fill = getattr(local, "fill", None) or make()
        local.fill = fill
        return [_copy_if_small(data, fill(numbers)) for numbers in batches]

    with ThreadPoolExecutor(workers) as pool:

        def epoch(number: int) -> Iterable[Any]:
            batches = shuffled_batches(data, number)
            for done in pool.map(share, [batches[start::workers] for start in range(workers)]):
                yield from done

        yield epoch


def _copy_if_small(data: Data, batch: Any) -> Any:
    """A buffer holds one batch; in the tests, which look at each, it is copied out. A measurement takes no copy."""
    x, y = batch
    return (x.copy(), y) if data.folder.name.endswith("-small") else (x, y)


def _fastest_copy(rows: NDArray[np.int64], batches: list[NDArray[np.int64]]) -> _Copy:
    """Whichever of the ways to copy is the fastest here, tried on a few batches."""
    buffer = np.ones((len(batches[0]), rows.shape[1]), dtype=np.int64)

    def seconds(copy: _Copy) -> float:
        times = []
        for numbers in batches[:_TRIED]:
            start = time.perf_counter()
            copy(rows, numbers, buffer)
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    ways = [_take, _index_select, *filter(None, [_compiled_memcpy()])]
    for copy in ways:
        seconds(copy)  # touches the file, compiles
    return min(ways, key=seconds)


def _take(rows: NDArray[np.int64], numbers: NDArray[np.int64], out: NDArray[np.int64]) -> None:
    np.take(rows, numbers, axis=0, out=out[: len(numbers)], mode="clip")  # the other modes copy twice


def _index_select(rows: NDArray[np.int64], numbers: NDArray[np.int64], out: NDArray[np.int64]) -> None:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the map is read-only, and is only read
        source = torch.from_numpy(rows)
    torch.index_select(source, 0, torch.from_numpy(numbers), out=torch.from_numpy(out[: len(numbers)]))


def _compiled_memcpy() -> _Copy | None:
    try:
        import numba
    except ImportError:
        return None
    signature = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    memcpy = signature(ctypes.cast(ctypes.CDLL(None).memcpy, ctypes.c_void_p).value)

    @numba.njit(nogil=True)  # type: ignore[untyped-decorator]
    def loop(source: int, numbers: Any, target: int, size: int) -> None:
        for place in range(len(numbers)):
            memcpy(target + place * size, source + numbers[place] * size, size)

    def copy(rows: NDArray[np.int64], numbers: NDArray[np.int64], out: NDArray[np.int64]) -> None:
        loop(rows.ctypes.data, numbers, out.ctypes.data, rows.shape[1] * rows.itemsize)

    return copy


def _antialiased() -> _Decode:
    """simplejpeg, and the filter that the kit's own pictures are resized with."""
    import simplejpeg
    import torch

    resize: Any = torch.ops.aten._upsample_bilinear2d_aa.out

    def decode(jpeg: bytes, out: NDArray[np.uint8]) -> None:
        picture = simplejpeg.decode_jpeg(jpeg, "RGB")
        source, target = (torch.from_numpy(each[None]).permute(0, 3, 1, 2) for each in (picture, out))
        resize(source, out.shape[:2], False, None, None, out=target)

    return decode


def _plain() -> _Decode:
    """simplejpeg at its fastest, resized by OpenCV without a filter against aliasing: other, coarser pictures."""
    import cv2
    import simplejpeg

    cv2.setNumThreads(1)

    def decode(jpeg: bytes, out: NDArray[np.uint8]) -> None:
        picture = simplejpeg.decode_jpeg(jpeg, "RGB", fastdct=True, fastupsample=True)
        cv2.resize(picture, out.shape[1::-1], dst=out, interpolation=cv2.INTER_LINEAR)

    return decode

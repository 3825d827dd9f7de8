"""Packs a source of samples into one store, or divides it among several, with the reading spread over threads.

When it helps: reading many small files, checking or shrinking pictures. These wait for the disk or compute outside
Python, so threads do them side by side, while one thread writes the samples in the order of the source.

What it costs: a few samples per thread in memory. The stores do not depend on the number of threads. A stop, a fault or
a full disk leaves what was there before: of several stores none is published before all samples are written.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from itertools import islice, repeat
from pathlib import Path
from typing import Any

from lightning_speedkit.data.argument_checks import checked_integer
from lightning_speedkit.data.sources.class_names import write_classes
from lightning_speedkit.data.sources.ordered_reading import Outcome, read_in_order
from lightning_speedkit.data.sources.pack_progress import PackProgress, payload_bytes, shown_progress
from lightning_speedkit.data.sources.source import Item, Source, UnreadRestError, held_item
from lightning_speedkit.data.sources.split_choice import check_fractions, split_of_each
from lightning_speedkit.data.store.lmdb_pack import iterate_samples
from lightning_speedkit.data.store.lmdb_writer import LMDBWriter
from lightning_speedkit.errors import EmptyStoreError, SampleMismatchError, SourceError, SpeedkitError
from lightning_speedkit.measure import read_hardware

__all__ = ["SKIP_BAD", "PackReport", "write_parallel", "write_splits"]

SKIP_BAD = "With skip_bad=True such samples are left out."
"""A note that the error of a bad sample has, if others could be packed without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackReport:
    """What a pack wrote: the stores by the name of their split, and what was skipped.

    ``unread`` are the files whose rest could not be read, which is one line in ``skipped`` for each, whatever the
    number of samples in it, which is not known.

    >>> paths, samples = {"train": Path("train.lmdb")}, {"train": 3}
    >>> PackReport(paths=paths, samples=samples, payload_bytes=24, skipped=(), seconds=0.1).total
    3
    """

    paths: Mapping[str, Path]
    samples: Mapping[str, int]
    payload_bytes: int
    skipped: tuple[str, ...]
    seconds: float
    unread: tuple[Path, ...] = ()

    @property
    def total(self) -> int:
        """The number of samples of all stores."""
        return sum(self.samples.values())


def write_parallel(
    source: Any,
    path: str | os.PathLike[str],
    *,
    transform: Callable[[Any], Any] | None = None,
    workers: int | None = None,
    limit: int | None = None,
    skip_bad: bool = False,
    progress: bool = False,
) -> PackReport:
    """Write the samples of a source into one store, which appears when it is complete.

    The names of the classes, if the source has them, are put beside the store: see
    :func:`~lightning_speedkit.data.sources.read_classes`.

    Args:
        source: what :func:`~lightning_speedkit.data.sources.open_source` gives, any other iterable of samples,
            or a map-style dataset, which is read in the order of its indices.
        path: the file to write; an older store there is replaced at the end.
        transform: called with each sample, by several threads at once; what it returns is stored.
        workers: threads that read and transform; by default one for each CPU core that this process may use.
        limit: at most so many samples.
        skip_bad: leave out samples that cannot be read, or differ in structure or type from the first one, and list
            them in the report.
        progress: show a progress bar on the standard error stream.

    Raises:
        SourceError: a sample cannot be read, or the source cannot; it names file, row or key. With ``skip_bad``: more
            samples were bad than good.
        SampleMismatchError: a sample differs in structure or type from the first.
        EmptyStoreError: there were no samples.
        StoreWriteError: the store cannot be written.

    Example::

        >>> import tempfile
        >>> from lightning_speedkit.data import LMDBDataset
        >>> folder = tempfile.TemporaryDirectory()
        >>> report = write_parallel([(i, i * i) for i in range(5)], f"{folder.name}/squares.lmdb", workers=2)
        >>> report.total, LMDBDataset(f"{folder.name}/squares.lmdb")[3]
        (5, (3, 9))
    """
    return write_splits(
        source, {"all": path}, {"all": 1.0}, transform=transform, workers=workers, limit=limit, skip_bad=skip_bad,
        progress=progress,
    )  # fmt: skip


def write_splits(
    source: Any,
    paths: Mapping[str, str | os.PathLike[str]],
    fractions: Mapping[str, float],
    *,
    seed: int = 0,
    transform: Callable[[Any], Any] | None = None,
    workers: int | None = None,
    limit: int | None = None,
    skip_bad: bool = False,
    progress: bool = False,
) -> PackReport:
    """Divide the samples of a source among several stores, in one pass.

    Each sample goes into one store; which one depends on ``seed`` and its place in the source alone. Within a store the
    order is that of the source. The stores are published one after the other when all samples are written, so a fault
    in a sample publishes none of them. The errors are those of :func:`write_parallel`.

    Args:
        source, transform, workers, limit, skip_bad, progress: as there; ``limit`` is that of all splits together.
        paths: the file of each split.
        fractions: the share of each split; their sum is 1. With a source of known length the sizes are exact to one.
        seed: another number is another division.
    """
    check_fractions(fractions)
    if set(paths) != set(fractions):
        raise ValueError(f"paths and fractions must have the same splits, got {list(paths)} and {list(fractions)}.")
    threads = read_hardware("cpu").cpu_count if workers is None else checked_integer("workers", workers, 1)
    limit = None if limit is None else checked_integer("limit", limit, 1)
    start = time.monotonic()
    count = _count(source, limit, skip_bad)
    splits = repeat(next(iter(paths))) if len(paths) == 1 else split_of_each(fractions, count, seed)
    threaded = transform is not None or (isinstance(source, Source) and source.read_in_threads)
    outcomes = read_in_order(_items(source, limit), transform, threads if threaded else 1)
    with ExitStack() as held:
        writers = {name: held.enter_context(LMDBWriter(path)) for name, path in paths.items()}
        bar = held.enter_context(shown_progress("packing", count) if progress else nullcontext(None))
        held.enter_context(closing(outcomes))
        written, skipped, unread = _write(outcomes, splits, writers, bar, skip_bad)
        _check_filled(writers, skipped, at_least=bool(unread))
    for writer in writers.values():
        write_classes(writer.path, source.classes if isinstance(source, Source) else ())
    return PackReport(
        paths={name: writer.path for name, writer in writers.items()},
        samples={name: writer.samples for name, writer in writers.items()},
        payload_bytes=written,
        skipped=tuple(skipped),
        unread=tuple(unread),
        seconds=time.monotonic() - start,
    )


def _write(
    outcomes: Iterator[Outcome],
    splits: Iterator[str],
    writers: Mapping[str, LMDBWriter],
    bar: PackProgress | None,
    skip_bad: bool,
) -> tuple[int, list[str], list[Path]]:
    """Write each sample to the store of its split; the bytes written, what was skipped, and unread files."""
    written = 0
    skipped: list[str] = []
    unread: list[Path] = []
    for place, sample, fault in outcomes:
        split = next(splits, None)
        if split is None:
            raise SourceError(f"{place}: the source has more samples than its length says.")
        error: SpeedkitError | None = fault
        if fault is None:
            try:
                writers[split].write(sample)
            except SampleMismatchError as mismatch:
                error = SampleMismatchError(f"{place}: {mismatch}")
            except (TypeError, ValueError) as refused:
                error = SourceError(f"{place}: {refused}")
        if error is None:
            size = payload_bytes(sample)
            written += size
            if bar is not None:
                bar.add(size)
        elif skip_bad:
            skipped.append(str(error))
            if isinstance(error, UnreadRestError):
                unread.append(error.file)
        else:
            error.__dict__.setdefault("__notes__", []).append(SKIP_BAD)  # add_note, which Python 3.10 does not have
            raise error
    return written, skipped, unread


def _check_filled(writers: Mapping[str, LMDBWriter], skipped: list[str], *, at_least: bool) -> None:
    """Before anything is published: there is something in each store, and not more bad samples than good ones."""
    good = sum(writer.samples for writer in writers.values())
    if skipped and len(skipped) > good:
        bad = "1 sample is" if len(skipped) == 1 else f"{len(skipped)} samples are"
        bad = f"At least {bad}" if at_least else bad
        raise SourceError(f"{bad} bad and {good} good, so nothing is written. {skipped[0]}")
    for writer in writers.values():
        if writer.samples == 0:
            raise EmptyStoreError(f"There were no samples to write to {writer.path}.")


def _items(source: Any, limit: int | None) -> Iterator[Item]:
    if isinstance(source, Source):
        return source.items() if limit is None else source.limited(limit)
    samples, _ = iterate_samples(source)
    items = (held_item(f"sample {number}", sample) for number, sample in enumerate(samples))
    return islice(items, limit)


def _count(source: Any, limit: int | None, skip_bad: bool) -> int | None:
    """How many samples there are, or ``None``. A shard that is cut short has no count, which may be a bad sample."""
    try:
        count = len(source)
    except TypeError:
        return None
    except SourceError:
        if not skip_bad:
            raise
        return None
    return count if limit is None else min(count, limit)

"""What is counted and what is concluded, with a clock and a loader made by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_speedkit.data.loading import loader_speed as module
from lightning_speedkit.data.loading.collate import collate_samples
from lightning_speedkit.data.loading.loader import RingLoader
from lightning_speedkit.data.loading.loader_speed import (
    LoaderPass,
    LoaderSpeed,
    first_pass_bound,
    measure_loader,
    what_bounds,
)


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class _Loader:
    """Ten batches of 4 samples and 48 bytes: 5 s to start, 1 s a batch in the first pass and 0.1 s in later ones."""

    def __init__(self, clock: _Clock, batches: int = 10) -> None:
        self.clock = clock
        self.batches = batches
        self.passes = 0
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        slow = self.passes == 1
        self.clock.now += 5.0 if slow else 0.0
        for _ in range(self.batches):
            self.clock.now += 1.0 if slow else 0.1
            yield torch.zeros(4, 3)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_first_and_later_passes_are_told_apart(clock: _Clock) -> None:
    loader = _Loader(clock)
    speed = measure_loader(loader, seconds=100.0)
    assert speed.first.batches == 10
    assert speed.first.seconds_start == 6.0
    assert (speed.first.samples, speed.first.bytes, speed.first.seconds) == (40, 480, 15.0)  # 5 s to start, 10 of 1 s
    assert speed.first.samples_per_second == pytest.approx(40 / 15)
    assert (speed.warm.samples, speed.warm.bytes) == (40, 480)
    assert speed.warm.samples_per_second == pytest.approx(40.0)
    assert speed.warm.bytes_per_second == pytest.approx(480.0)
    assert set(loader.epochs) == {0}


@pytest.mark.parametrize(
    ("samples", "collate"),
    [
        ([()] * 7, None),
        ([{"text": "abc"}] * 7, None),
        ([("a", "b")] * 7, None),
        ([torch.zeros(i) for i in range(7)], list),
    ],
)
@pytest.mark.parametrize("torch_loader", [False, True])
def test_samples_are_counted_where_a_batch_does_not_tell_them(samples: Any, collate: Any, torch_loader: bool) -> None:
    """Batches of nothing, of text, and lists of tensors of different sizes; seven samples, by three."""
    loader: Any
    if torch_loader:
        loader = DataLoader(samples, batch_size=3, collate_fn=collate or collate_samples)
    else:
        loader = RingLoader(samples, batch_size=3, num_workers=0, collate=collate)
    speed = measure_loader(loader, seconds=0.01)
    assert speed.first.samples == speed.warm.samples == min(3 * speed.first.batches, 7)  # a slow machine may stop early


def test_of_several_ranks_the_samples_of_one_are_counted() -> None:
    samples = [torch.zeros(2)] * 7
    loaders = [RingLoader(samples, batch_size=3, num_workers=0, rank=rank, world_size=2) for rank in (0, 1)]
    measured = [measure_loader(loader, seconds=0.01).first.samples for loader in loaders]
    assert measured == [sum(len(batch) for batch in loader) for loader in loaders]


def test_a_long_pass_is_stopped_and_only_its_batches_are_read_again(clock: _Clock) -> None:
    loader = _Loader(clock)
    speed = measure_loader(loader, seconds=3.0)
    assert speed.first.batches == speed.warm.batches == 4  # the one of the start, and three of 1 s each
    assert speed.warm.samples == 16
    assert loader.passes == 1 + 8  # 0.4 s each


def test_one_batch_is_measured_with_its_start(clock: _Clock) -> None:
    speed = measure_loader(_Loader(clock, batches=1), seconds=1.0)
    assert (speed.first.samples, speed.first.seconds) == (4, 6.0)


def test_the_fastest_of_the_later_passes_counts(clock: _Clock) -> None:
    class Unsteady(_Loader):
        def __iter__(self) -> Iterator[Any]:
            self.passes += 1
            for _ in range(2):
                self.clock.now += 0.5 if self.passes == 3 else 5.0
                yield torch.zeros(4, 3)

    assert measure_loader(Unsteady(clock), seconds=30.0).warm.seconds == 1.0


def test_batches_made_ahead_are_no_speed(clock: _Clock) -> None:
    """All of them are ready when the first one is handed out: what they took passed before that."""

    class Ahead(_Loader):
        num_workers, prefetch_factor = 2, 2

        def __iter__(self) -> Iterator[Any]:
            self.passes += 1
            self.clock.now += 4.0
            yield from [torch.zeros(4, 3)] * self.batches

    speed = measure_loader(Ahead(clock, batches=4), seconds=10.0)
    assert (speed.first.samples_per_second, speed.warm.samples_per_second) == (4.0, 4.0)
    assert speed.ahead == 4
    assert first_pass_bound(speed, disk_bytes_per_second=None) == "too few batches to tell"
    speed = measure_loader(Ahead(clock, batches=5), seconds=10.0)
    assert first_pass_bound(speed, disk_bytes_per_second=None) == "as fast as the later ones"


@pytest.mark.parametrize(
    ("workers", "factor", "ahead"),
    [(3, 2, 6), (1, 1, 2), (0, 2, 1), (0, None, 1), (None, 2, 10), (None, 3, 15)],
)
def test_how_many_batches_a_loader_makes_ahead(
    workers: int | None, factor: int | None, ahead: int, clock: _Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "cpu_count", lambda: 5)
    loader = _Loader(clock, batches=1)
    loader.num_workers, loader.prefetch_factor = workers, factor  # type: ignore[attr-defined]
    assert measure_loader(loader, seconds=1.0).ahead == ahead


def test_the_clock_runs_while_the_iterator_is_made(clock: _Clock) -> None:
    """As torch's DataLoader, which starts its workers and asks for the first batches there."""

    class Early(_Loader):
        def __iter__(self) -> Iterator[Any]:
            self.clock.now += 8.0
            return iter([torch.zeros(4, 3)] * 2)

    speed = measure_loader(Early(clock), seconds=1.0)
    assert (speed.first.samples, speed.first.seconds, speed.first.seconds_start) == (8, 8.0, 8.0)


def test_an_empty_loader_or_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="list has no batch"):
        measure_loader([])
    for seconds in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="seconds"):
            measure_loader([torch.zeros(1)], seconds=seconds)


def _read(samples: int, size: int = 1000) -> LoaderPass:
    return LoaderPass(batches=9, samples=samples, bytes=size, seconds=1.0)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({}, "Python code per sample"),
        ({"python": False}, "handing out batches"),
        ({"copy_bytes_per_second": 2000.0}, "memory copy"),
        ({"copy_bytes_per_second": 2001.0}, "Python code per sample"),
        ({"plain": _read(143), "work": "decoding"}, "decoding on the CPU"),
        ({"plain": _read(143), "work": "transform"}, "the Python transform"),
        ({"plain": _read(142), "work": "transform"}, "Python code per sample"),
        ({"plain": _read(143), "work": "decoding", "copy_bytes_per_second": 1000.0}, "decoding on the CPU"),
        ({"store_bytes": 81, "memory_bytes": 100, "copy_bytes_per_second": 1000.0}, "the disk"),
        ({"store_bytes": 80, "memory_bytes": 100}, "Python code per sample"),
        ({"store_bytes": 81, "memory_bytes": 0}, "Python code per sample"),
    ],
    ids=str,
)
def test_what_bounds_a_loader_of_100_samples_and_1000_bytes_a_second(arguments: dict[str, Any], name: str) -> None:
    bound = what_bounds(_read(100), **{"copy_bytes_per_second": 1e9, **arguments})
    assert bound.name == name
    assert bound.advice.endswith(".")


@pytest.mark.parametrize(
    ("first", "disk", "words"),
    [
        (_read(70), 1e9, "as fast as the later ones"),
        (_read(142), 1e9, "as fast as the later ones"),
        (_read(143), 1e9, "faster than the later ones, which other programs may have slowed"),
        (_read(5_000), None, "faster than the later ones"),
        (_read(69), None, "reading from the disk, and the checksum"),
        (_read(69), 1000.0, "as fast as the disk"),
        (_read(69), 501.0, "as fast as the disk"),
        (_read(69), 1999.0, "as fast as the disk"),
        (_read(69), 499.0, "by page faults and the checksum"),  # the disk cannot be that fast: it was in memory
        (_read(69), 2001.0, "by page faults and the checksum"),
    ],
)
def test_what_bounds_the_first_pass(first: LoaderPass, disk: float | None, words: str) -> None:
    assert words in first_pass_bound(LoaderSpeed(first=first, warm=_read(100)), disk_bytes_per_second=disk)


@pytest.mark.parametrize("rate", [69, 100, 5_000])
def test_too_few_batches_say_nothing(rate: int) -> None:
    speed = LoaderSpeed(first=_read(rate), warm=_read(100), ahead=9)
    assert first_pass_bound(speed, disk_bytes_per_second=1000.0) == "too few batches to tell"
    one = LoaderPass(batches=1, samples=rate, bytes=1000, seconds=1.0)
    speed = LoaderSpeed(first=one, warm=_read(100))
    assert first_pass_bound(speed, disk_bytes_per_second=1000.0) == "too few batches to tell"


@pytest.mark.parametrize(("start", "words"), [(0.51, "0.51 s until the first batch"), (0.5, "as fast as the disk")])
def test_a_long_start_is_told_apart(start: float, words: str) -> None:
    first = LoaderPass(batches=9, samples=50, bytes=1000, seconds=1.0, seconds_start=start)
    assert words in first_pass_bound(LoaderSpeed(first=first, warm=_read(100)), disk_bytes_per_second=1000.0)


def test_samples_of_one_size_with_a_transform_are_not_to_be_padded() -> None:
    """Padding would change nothing: it is the transform that makes them pass through Python."""
    for arguments in ({"work": "transform"}, {"decoded": _read(120)}):
        bound = what_bounds(_read(100), copy_bytes_per_second=1e9, plain=_read(120), **arguments)
        assert bound.name == "Python code per sample"
        assert "pad" not in bound.advice
        assert "transform" in bound.advice
    assert "pad" in what_bounds(_read(100), copy_bytes_per_second=1e9).advice


@pytest.mark.parametrize(
    ("decoded", "name"),
    [  # 1 ms a sample without both, 10 ms with both: the rest is divided at 5.5 ms
        (1000 / 5.6, "decoding on the CPU"),
        (1000 / 5.4, "the Python transform"),
        (1000 / 1.1, "the Python transform"),
        (100.0, "decoding on the CPU"),
        (120.0, "decoding on the CPU"),
    ],
)
def test_the_larger_share_of_decoding_and_transform_is_named(decoded: float, name: str) -> None:
    with_fields = LoaderPass(batches=9, samples=10_000, bytes=1, seconds=10_000 / decoded)
    bound = what_bounds(_read(100), copy_bytes_per_second=1e9, plain=_read(1000), decoded=with_fields)
    assert bound.name == name


def test_nothing_read_is_no_rate() -> None:
    nothing = LoaderPass(batches=0, samples=0, bytes=0, seconds=0.0)
    assert (nothing.samples_per_second, nothing.bytes_per_second) == (0.0, 0.0)

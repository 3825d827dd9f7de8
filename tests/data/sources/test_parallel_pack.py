"""Packing a source: the order, several stores at once, bad samples, faults, and a stop in the middle."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import sys
import tarfile
import threading
import time
import weakref
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_speedkit.data import LMDBDataset, verify_lmdb, write_lmdb
from lightning_speedkit.data.sources import Item, Source, open_source, read_classes
from lightning_speedkit.data.sources.parallel_pack import write_parallel, write_splits
from lightning_speedkit.data.sources.source import bad_item
from lightning_speedkit.data.sources.split_choice import split_of_each
from lightning_speedkit.data.sources.webdataset_shards import WebDatasetShards
from lightning_speedkit.errors import EmptyStoreError, SampleMismatchError, SourceError, StoreWriteError
from tests.data.forked import end_of_fork


class Made(Source):
    """``count`` samples, some of which cannot be read."""

    read_in_threads = True

    def __init__(self, count: int, bad: tuple[int, ...] = (), classes: tuple[str, ...] = ()) -> None:
        self.count = count
        self.bad = bad
        self.classes = classes

    def __len__(self) -> int:
        return self.count

    def items(self) -> Iterator[Item]:
        for i in range(self.count):
            yield bad_item(f"item {i}", "broken") if i in self.bad else Item(f"item {i}", lambda i=i: sample(i))


def sample(i: int) -> tuple[bytes, int]:
    time.sleep(0.0005 * (i % 4))
    return hashlib.sha256(b"%d" % i).digest() * (i % 7), i


def stored(path: Any) -> list[Any]:
    return list(LMDBDataset(path))


def files() -> list[str]:
    return sorted(os.listdir())  # noqa: PTH208


def test_a_store_does_not_depend_on_the_number_of_threads() -> None:
    contents = []
    for workers in (1, 2, 7):
        report = write_parallel(Made(150), f"{workers}.lmdb", workers=workers)
        assert (report.total, report.skipped, report.paths["all"]) == (150, (), Path(f"{workers}.lmdb").absolute())
        contents.append(Path(f"{workers}.lmdb").read_bytes())
    assert contents[0] == contents[1] == contents[2]
    assert stored("2.lmdb") == [sample(i) for i in range(150)]
    assert report.payload_bytes == verify_lmdb("2.lmdb").payload_bytes == sum(32 * (i % 7) + 8 for i in range(150))


@pytest.mark.parametrize("samples", [[(1, "a"), (2, "b")], ((i, str(i)) for i in range(3)), torch.arange(4)])
def test_any_iterable_is_a_source(samples: Any) -> None:
    expected = list(samples) if not isinstance(samples, Iterator) else [(i, str(i)) for i in range(3)]
    write_parallel(samples, "a.lmdb", workers=2)
    assert stored("a.lmdb") == expected


class Numbered:
    """A map-style dataset that no IndexError ends."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return 10 * index


def test_a_map_style_dataset_is_read_by_its_indices() -> None:
    assert write_parallel(Numbered(), "a.lmdb", limit=10).total == 3
    assert stored("a.lmdb") == [0, 10, 20]


@pytest.mark.parametrize("source", ["photos/", b"abc", {"a": 1}, 3])
def test_what_holds_no_samples_is_refused(source: Any) -> None:
    with pytest.raises(TypeError, match="samples must be an iterable"):
        write_parallel(source, "a.lmdb")
    assert files() == []


def test_the_transform_is_applied_and_a_limit_ends_the_reading() -> None:
    asked = []
    source = (asked.append(i) or i for i in range(1000))
    write_parallel(source, "a.lmdb", transform=lambda i: (i, i * i), limit=20, workers=3)
    assert stored("a.lmdb") == [(i, i * i) for i in range(20)]
    assert asked == list(range(20))


@pytest.mark.parametrize("known", [True, False])
def test_splits_are_disjoint_exhaustive_in_order_and_the_same_for_a_seed(known: bool) -> None:
    fractions = {"train": 0.7, "val": 0.2, "test": 0.1}
    seen = {}
    for workers, seed in ((1, 0), (4, 0), (2, 1)):
        source: Any = Made(200) if known else (sample(i) for i in range(200))
        paths = {name: f"{workers}/{name}.lmdb" for name in fractions}
        report = write_splits(source, paths, fractions, seed=seed, workers=workers)
        numbers = {name: [number for _, number in stored(path)] for name, path in paths.items()}
        assert sorted(chain.from_iterable(numbers.values())) == list(range(200))
        assert all(one == sorted(one) for one in numbers.values())
        assert report.samples == {name: len(one) for name, one in numbers.items()}
        if known:
            assert report.samples == {"train": 140, "val": 40, "test": 20}
        seen[workers] = numbers
    assert seen[1] == seen[4] != seen[2]


def test_a_bad_sample_is_named_and_nothing_is_published() -> None:
    write_lmdb([0], "val.lmdb")
    before = Path("val.lmdb").read_bytes()
    for workers in (1, 3):
        with pytest.raises(SourceError, match=r"^item 61: broken\nWith skip_bad=True such samples are left out\.$"):
            write_parallel(Made(100, bad=(61, 80)), "a.lmdb", workers=workers)
        with pytest.raises(SourceError, match=r"^item 61: broken\nWith skip_bad=True such samples are left out\.$"):
            write_splits(Made(100, bad=(61,)), {"t": "t.lmdb", "v": "val.lmdb"}, {"t": 0.5, "v": 0.5}, workers=workers)
    assert files() == ["val.lmdb"]
    assert Path("val.lmdb").read_bytes() == before


def test_bad_samples_are_skipped_and_listed_on_demand() -> None:
    fractions = {"t": 0.5, "v": 0.5}
    paths = {"t": "t.lmdb", "v": "v.lmdb"}
    write_splits(Made(40), paths, fractions, workers=2)
    whole = {name: stored(path) for name, path in paths.items()}
    report = write_splits(Made(40, bad=(3, 17)), paths, fractions, workers=2, skip_bad=True)
    assert report.skipped == ("item 3: broken", "item 17: broken")
    assert report.total == 38
    for name, path in paths.items():  # the others are in the splits in which they were
        assert stored(path) == [one for one in whole[name] if one[1] not in (3, 17)]


def test_samples_that_differ_from_the_first_name_item_and_field() -> None:
    samples = [{"a": 1}, {"a": "x"}, {"b": 1}, {"a": 2}, {"a": 3}]
    with pytest.raises(SampleMismatchError, match=r"^sample 1: Sample 1, field \['a'\]: expected int"):
        write_parallel(samples, "a.lmdb")
    report = write_parallel(samples, "a.lmdb", skip_bad=True)
    assert [text[:9] for text in report.skipped] == ["sample 1:", "sample 2:"]
    assert stored("a.lmdb") == [{"a": 1}, {"a": 2}, {"a": 3}]
    with pytest.raises(SourceError, match=r"^sample 0: Sample 0: The sample is a set"):
        write_parallel([{1}, {2}], "b.lmdb")


def test_more_bad_than_good_is_a_fault_of_the_source() -> None:
    samples = ["odd one", 1, 2, 3]
    with pytest.raises(SourceError, match=r"3 samples are bad and 1 good, so nothing is written\. sample 1: "):
        write_parallel(samples, "a.lmdb", skip_bad=True)
    with pytest.raises(EmptyStoreError):
        write_parallel([], "a.lmdb")
    assert files() == []


def test_a_shard_that_was_cut_short_is_a_bad_sample_if_those_are_skipped() -> None:
    with tarfile.open("a.tar", "w") as archive:
        for i in range(9):
            info = tarfile.TarInfo(f"{i}.cls")
            info.size = 1
            archive.addfile(info, io.BytesIO(b"%d" % i))
    Path("a.tar").write_bytes(Path("a.tar").read_bytes()[: 7 * 1024 + 100])
    with pytest.raises(SourceError, match=r"a\.tar"):
        write_parallel(open_source("a.tar"), "a.lmdb")
    report = write_parallel(open_source("a.tar"), "a.lmdb", skip_bad=True)
    assert [one["cls"] for one in stored("a.lmdb")] == list(range(report.total)) == list(range(6))
    assert [text.partition(": ")[0] for text in report.skipped] == ["a.tar, after the key '5'"]
    assert report.unread == (Path("a.tar"),)


def test_the_number_of_bad_samples_is_told_as_far_as_it_is_known() -> None:
    with pytest.raises(SourceError, match=r"^1 sample is bad and 0 good, so nothing is written\. item 0: broken$"):
        write_parallel(Made(1, bad=(0,)), "a.lmdb", skip_bad=True)
    head = io.BytesIO()
    with tarfile.open(fileobj=head, mode="w") as archive:
        info = tarfile.TarInfo("0.cls")
        info.size = 1
        archive.addfile(info, io.BytesIO(b"0"))
    Path("a.tar").write_bytes(head.getvalue()[:1024])  # without its end mark
    Path("b.tar").write_bytes(head.getvalue()[:600])
    source = WebDatasetShards([Path("b.tar"), Path("b.tar")])
    with pytest.raises(SourceError, match=r"^At least 2 samples are bad and 0 good, so nothing is written\. b\.tar: "):
        write_parallel(source, "a.lmdb", skip_bad=True)
    with pytest.raises(SourceError, match=r"^At least 1 sample is bad and 0 good"):
        write_parallel(open_source("b.tar"), "a.lmdb", skip_bad=True)
    assert files() == ["a.tar", "b.tar"]


def test_an_empty_split_publishes_none_of_the_others() -> None:
    with pytest.raises(SourceError, match="too few for this split: v would be empty"):
        write_splits(Made(4), {"t": "t.lmdb", "v": "v.lmdb"}, {"t": 0.9, "v": 0.1})
    fractions = {"t": 0.9, "v": 0.1}
    held = list(split_of_each(fractions, 10, 0)).index("v")
    with pytest.raises(EmptyStoreError, match=r"v\.lmdb"):
        write_splits(Made(10, bad=(held,)), {"t": "t.lmdb", "v": "v.lmdb"}, fractions, skip_bad=True)
    assert files() == []


def test_classes_are_put_beside_each_store_and_those_of_an_older_one_removed() -> None:
    paths = {"t": "t.lmdb", "v": "v.lmdb"}
    write_splits(Made(10, classes=("a", "b")), paths, {"t": 0.5, "v": 0.5})
    assert [read_classes(path) for path in paths.values()] == [("a", "b")] * 2
    write_parallel(Made(10), "t.lmdb")
    assert (read_classes("t.lmdb"), read_classes("v.lmdb")) == (None, ("a", "b"))
    assert files() == ["t.lmdb", "v.classes.json", "v.lmdb"]


def test_a_source_that_has_more_than_it_says_is_a_fault() -> None:
    class Lying(Made):
        def __len__(self) -> int:
            return self.count - 5

    with pytest.raises(SourceError, match="item 15: the source has more samples than its length says"):
        write_splits(Lying(20), {"t": "t.lmdb", "v": "v.lmdb"}, {"t": 0.5, "v": 0.5})


def test_wrong_arguments_are_refused_before_anything_is_written() -> None:
    for name in ("workers", "limit"):
        arguments: dict[str, Any]
        for arguments, error in (({name: 0}, ValueError), ({name: True}, TypeError), ({name: 1.5}, TypeError)):
            with pytest.raises(error, match=name):
                write_parallel([1], "a.lmdb", **arguments)
    with pytest.raises(ValueError, match="same splits"):
        write_splits([1], {"a": "a.lmdb"}, {"b": 1.0})
    with pytest.raises(ValueError, match="sum"):
        write_splits([1], {"a": "a.lmdb"}, {"a": 0.5})
    Path("folder.lmdb").mkdir()
    with pytest.raises(StoreWriteError, match="is a folder"):
        write_parallel([1], "folder.lmdb")
    assert files() == ["folder.lmdb"]


def test_the_memory_is_bounded_by_the_threads_and_not_by_the_source() -> None:
    alive, most, lock = 0, 0, threading.Lock()

    def count(change: int) -> None:
        nonlocal alive, most
        with lock:
            alive += change
            most = max(most, alive)

    class Big(Source):
        read_in_threads = True

        def __len__(self) -> int:
            return 400

        def items(self) -> Iterator[Item]:
            return (Item(str(i), self.read) for i in range(400))

        def read(self) -> Any:
            value = np.zeros(1000)
            weakref.finalize(value, count, -1)
            count(+1)
            return value

    write_parallel(Big(), "a.lmdb", workers=2)
    assert most <= 8 * (2 * 2 + 2)


class Stopped(Source):
    """Presses Ctrl-C while its items are being read."""

    read_in_threads = True

    def __len__(self) -> int:
        return 100_000

    def items(self) -> Iterator[Item]:
        for i in range(len(self)):
            yield Item(str(i), lambda i=i: self.read(i))

    def read(self, i: int) -> bytes:
        if i == 3000:
            os.kill(os.getpid(), signal.SIGINT)
        return bytes(8000)


def test_ctrl_c_leaves_nothing_behind(capfd: pytest.CaptureFixture[str]) -> None:
    def stopped() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            write_splits(Stopped(), {"a": "a.lmdb", "b": "b.lmdb"}, {"a": 0.5, "b": 0.5}, workers=3)
        finally:
            print([thread.name for thread in threading.enumerate()], files(), file=sys.stderr, flush=True)

    assert end_of_fork(stopped) == "raised"
    err = capfd.readouterr().err
    assert err.splitlines()[0] == "['MainThread'] []"
    assert err.splitlines()[-1] == "KeyboardInterrupt"
    assert files() == []

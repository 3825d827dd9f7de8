"""What a folder of stores serves, and how the missing ones are packed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_speedkit.data import LMDBDataModule, LMDBDataset, verify_lmdb, write_lmdb
from lightning_speedkit.data import lmdb_datamodule as module_under_test
from lightning_speedkit.errors import EmptyStoreError
from tests.data.forked import end_of_fork
from tests.data.numbers import Numbers, Recorder, flat, trainer


def test_a_missing_split_is_no_loader_or_an_error_that_lists_what_is_there(tmp_path: Path) -> None:
    write_lmdb([(torch.ones(4) * 0.1, 1)] * 4, tmp_path / "train.lmdb")
    model, data = Recorder(), LMDBDataModule(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*val.*")
        trainer(max_epochs=1).fit(model, datamodule=data)
    assert flat(model.seen["train"]) == [1, 1, 1, 1]
    for run in (trainer().validate, trainer().test, trainer().predict):
        with pytest.raises(MisconfigurationException, match=r"In that folder: train.lmdb"):
            run(model, datamodule=data)
    with pytest.raises(MisconfigurationException, match=r"train.lmdb. In that folder: no .lmdb file"):
        trainer(max_epochs=1).fit(model, datamodule=LMDBDataModule(tmp_path / "nowhere"))


def test_only_missing_splits_are_packed_and_only_once(tmp_path: Path) -> None:
    write_lmdb([(torch.zeros(4), 0)], tmp_path / "val.lmdb")
    asked = []

    class Asked(Numbers):
        def samples(self, split: str) -> Any:
            asked.append(split)
            return None if split == "predict" else super().samples(split)

    data = Asked(tmp_path)
    data.prepare_data()
    assert asked == ["train", "test", "predict"]
    data.prepare_data()
    assert asked[3:] == ["predict"]
    assert [verify_lmdb(data.path(split)).samples for split in ("train", "val", "test")] == [24, 1, 7]
    assert data.predict_dataloader() == []


def test_samples_that_yield_nothing(tmp_path: Path) -> None:
    class Nothing(LMDBDataModule):
        def samples(self, split: str) -> Any:
            return iter(())

    with pytest.raises(EmptyStoreError, match=r"samples\('train'\) of Nothing yielded nothing"):
        Nothing(tmp_path).prepare_data()
    assert not list(tmp_path.iterdir())


def test_two_processes_pack_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, go = os.pipe()
    trace = tmp_path / "trace"
    trace.write_text("")

    class Traced(Numbers):
        def samples(self, split: str) -> Any:
            return self._numbers() if split == "train" else None

        def _numbers(self) -> Iterator[int]:
            with trace.open("a") as file:
                file.write("packed ")
            os.write(go, b"x")
            yield from range(5)

    child = os.fork()
    if child == 0:
        Traced(tmp_path / "root").prepare_data()
        os._exit(0)
    assert os.read(started, 1) == b"x"  # the child is packing, or has just packed
    Traced(tmp_path / "root").prepare_data()
    os.waitpid(child, 0)
    assert trace.read_text() == "packed "
    assert len(LMDBDataset(tmp_path / "root" / "train.lmdb")) == 5
    # And when both have seen that nothing is there: the one that had to wait finds the other's store.
    other = tmp_path / "other"
    real = module_under_test.exclusive_lock

    def packed_meanwhile(path: Path, *, wait: bool) -> Any:
        monkeypatch.setattr(module_under_test, "exclusive_lock", real)
        assert end_of_fork(lambda: Traced(other).prepare_data()) == "returned"
        return real(path, wait=wait)

    monkeypatch.setattr(module_under_test, "exclusive_lock", packed_meanwhile)
    Traced(other).prepare_data()
    assert trace.read_text() == "packed packed "


def test_transforms_per_split(tmp_path: Path) -> None:
    class Shifted(Numbers):
        def transform(self, split: str) -> Callable[[Any], Any] | None:
            return (lambda sample: sample[1] + 100) if split == "train" else None

    data = Shifted(tmp_path, shuffle=False, batch_size=3)
    data.prepare_data()
    assert next(iter(data.train_dataloader())).tolist() == [100, 101, 102]
    assert next(iter(data.val_dataloader()))[1].tolist() == [0, 1, 2]

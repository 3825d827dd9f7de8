"""What a folder of stores serves, and how the missing ones are packed."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_speedkit.data import ImageField, LMDBDataModule, LMDBDataset, verify_lmdb, write_lmdb
from lightning_speedkit.data import lmdb_datamodule as module_under_test
from lightning_speedkit.errors import EmptyStoreError, StoreWriteError
from tests.data.forked import end_of_fork
from tests.data.numbers import Numbers, Recorder, flat, trainer
from tests.data.pictures import encoded


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
    with pytest.raises(MisconfigurationException, match=r"train.lmdb. There is no folder"):
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


class Generator(LMDBDataModule):
    def samples(self, split: str) -> Any:
        if split == "train":
            yield from range(3)


def test_a_generator_function_is_told_that_it_never_returns_none(tmp_path: Path) -> None:
    with pytest.raises(EmptyStoreError, match=r"samples\('val'\) of Generator .* never returns None.*another method"):
        Generator(tmp_path).prepare_data()
    assert len(LMDBDataset(tmp_path / "train.lmdb")) == 3


@pytest.mark.parametrize("given", [{"train": [1]}, "data/train", b"123"])
def test_what_samples_must_not_return(tmp_path: Path, given: Any) -> None:
    class Given(LMDBDataModule):
        def samples(self, split: str) -> Any:
            return given

    with pytest.raises(TypeError, match=rf"samples\('train'\) of Given returned a {type(given).__name__}"):
        Given(tmp_path / "root").prepare_data()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["file", "file/below", "locked"])
def test_a_root_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    (tmp_path / "file").write_text("")
    if where == "locked":  # as in a read-only folder, also for the superuser

        def refuse(path: Path, *, wait: bool) -> Any:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

        monkeypatch.setattr(module_under_test, "exclusive_lock", refuse)
    with pytest.raises(StoreWriteError, match=r"train.lmdb is not there and cannot be packed .*root must be a folder"):
        Numbers(tmp_path / where).prepare_data()


def test_an_error_in_the_samples_is_not_taken_for_one_of_the_folder(tmp_path: Path) -> None:
    class Failing(LMDBDataModule):
        def samples(self, split: str) -> Any:
            return (Path(tmp_path, "absent").read_bytes() for _ in range(2))

    with pytest.raises(FileNotFoundError, match="absent"):
        Failing(tmp_path / "root").prepare_data()


@pytest.mark.parametrize("stage", [None, "train", "val", ""])
def test_a_stage_is_one_of_lightnings(tmp_path: Path, stage: Any) -> None:
    with pytest.raises(ValueError, match=f"stage must be one of 'fit', 'validate', 'test', 'predict', got {stage!r}"):
        Numbers(tmp_path).setup(stage)


def test_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert LMDBDataModule("~/data").root == tmp_path / "data"
    assert LMDBDataModule("data~").root == Path.cwd() / "data~"


_PICTURE = encoded(np.zeros((8, 9, 3), np.uint8), "PNG")


class _Decoded(LMDBDataModule):
    def transform(self, split: str) -> Callable[[Any], Any]:
        return len


class _Collated(LMDBDataModule):
    def collate(self, samples: Any) -> Any:
        return len(samples)


class _Fields(LMDBDataModule):
    def fields(self, split: str) -> dict[str | int, ImageField]:
        return {0: ImageField(4)}


def test_pictures_that_nothing_decodes_are_told_once(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    for split in ("train", "val"):
        write_lmdb([(_PICTURE, 0), (_PICTURE, 1)], tmp_path / f"{split}.lmdb")
    data = LMDBDataModule(tmp_path)
    data.train_dataloader()
    data.val_dataloader()
    told = [str(warning.message) for warning in recwarn if "encoded pictures" in str(warning.message)]
    assert len(told) == 1
    assert "encoded pictures at 0, and nothing of LMDBDataModule decodes them" in told[0]
    assert "return {0: ImageField(224)}" in told[0]


@pytest.mark.parametrize("kind", [_Decoded, _Collated, _Fields])
def test_pictures_that_something_decodes_are_not_told(
    tmp_path: Path, kind: type[LMDBDataModule], recwarn: pytest.WarningsRecorder
) -> None:
    write_lmdb([(_PICTURE, 0)], tmp_path / "train.lmdb")
    kind(tmp_path).train_dataloader()
    assert not [warning for warning in recwarn if "encoded pictures" in str(warning.message)]


def test_fields_that_are_no_dict_are_named(tmp_path: Path) -> None:
    class Field(LMDBDataModule):
        def fields(self, split: str) -> Any:
            return ImageField(4)

    write_lmdb([(_PICTURE, 0)], tmp_path / "train.lmdb")
    with pytest.raises(
        TypeError, match=r"fields must be a dict .* such as \{0: ImageField\(224\)\}.*; got ImageField\("
    ):
        Field(tmp_path).train_dataloader()

"""Loaders with another batch size: what they give afterwards, and runs whose batches come from each kind of owner."""

from __future__ import annotations

import multiprocessing
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, SubsetRandomSampler

from lightning_speedkit.data import SpeedkitDataModule
from lightning_speedkit.memory.batch_size import BatchSizeSearch
from lightning_speedkit.memory.batch_size_loaders import (
    resized,
    resized_loader,
    samples_at_hand,
    set_size_of_owner,
    size_of_loaders,
    size_of_owner,
)
from tests.memory.scarce import Data, Net, dataset, fit, same


class Kit(SpeedkitDataModule):
    def dataset(self, split: str) -> Any:
        return dataset() if split in ("train", "val") else None


def _kit(size: int) -> Kit:
    return Kit(batch_size=size, loader="inline")


@pytest.mark.parametrize("make", [Data, _kit])
def test_a_datamodule_is_asked_with_its_batch_size(make: Any) -> None:
    plain, _ = fit(None, Net(13), make(13))
    data, search = make(4), BatchSizeSearch(start=10, limit=40)
    other, _ = fit(search, Net(13), data)
    assert search.batch_size == 13 == (data.batch_size if make is _kit else data.hparams["batch_size"])
    for name, value in plain.items():
        assert same(other[name], value), name


class _Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        while True:
            yield torch.ones(2), torch.ones(1)


class _Plain:
    def __iter__(self) -> Any:
        return iter([tuple(torch.ones(4, n) for n in (2, 1))])


class _Own(DataLoader[Any]):
    def __init__(self) -> None:
        super().__init__(dataset(), 4)


def test_a_stream_needs_a_limit() -> None:
    with pytest.raises(MisconfigurationException, match="Set its limit"):
        fit(BatchSizeSearch(), Net(), DataLoader(_Endless(), 4))
    search = BatchSizeSearch(limit=20)
    fit(search, Net(), DataLoader(_Endless(), 4), max_steps=1, max_epochs=1)
    assert search.batch_size == 20


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (_Plain(), "_Plain another batch size: it has no batch_size"),
        (DataLoader(dataset(), None), "DataLoader another batch size: its batch_size is None"),
        (_Own(), "_Own another batch size: it has a constructor of its own"),
        ({"a": DataLoader(dataset(), 4), "b": DataLoader(dataset(), 5)}, r"have \[4, 5\]"),
    ],
)
def test_loaders_that_cannot_follow_are_refused(data: Any, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        fit(BatchSizeSearch(), Net(), data)


class _Noisy(Dataset[Any]):
    """Draws in the worker, which is seeded by what the loader draws."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        x = torch.full((2,), index / 60) + torch.rand(2)
        return x, x.sum(0, keepdim=True)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loader_with_a_worker(persistent: bool) -> None:
    def given(size: int) -> Any:
        return DataLoader(_Noisy(), size, shuffle=True, num_workers=1, persistent_workers=persistent)

    net, search = Net(13), BatchSizeSearch(start=12, limit=14, steps=2)
    plain, _ = fit(None, Net(13), given(13))
    other, _ = fit(search, net, given(4))
    assert (search.batch_size, net.sizes) == (13, {13, 8})
    assert [(trial.size, trial.fits) for trial in search.trials] == [(12, True), (14, False), (13, True)]
    for name, value in plain.items():
        assert same(other[name], value), name
    assert multiprocessing.active_children() == []


def _sum(samples: list[int]) -> Tensor:
    return torch.tensor(samples).sum()


def test_a_resized_loader_differs_in_its_size_only() -> None:
    generator = torch.Generator().manual_seed(4)
    sampler = SubsetRandomSampler([1, 2, 4, 8, 16], generator)
    old = DataLoader(range(20), 2, sampler=sampler, collate_fn=_sum, drop_last=True, generator=generator)  # type: ignore[arg-type]
    old.note = "mine"  # type: ignore[attr-defined]
    new = resized_loader(old, 4)
    assert new is not old
    assert (new.sampler, new.collate_fn, new.generator, new.note) == (sampler, _sum, generator, "mine")
    assert (old.batch_size, new.batch_size, new.drop_last, len(list(new))) == (2, 4, True, 1)  # the fifth is left over
    whole = resized_loader(old, 5)
    assert [batch.item() for batch in whole] == [31]
    assert resized_loader(old, 2) is old
    with_worker = DataLoader(range(4), 2, num_workers=1, prefetch_factor=3, persistent_workers=True)  # type: ignore[arg-type]
    kept = resized_loader(with_worker, 1)
    assert (kept.num_workers, kept.prefetch_factor, kept.persistent_workers) == (1, 3, True)


def test_loaders_keep_their_structure() -> None:
    small, right = DataLoader(range(6), 2), DataLoader(range(6), 3)  # type: ignore[arg-type]
    found = resized({"a": small, "b": [right]}, 3)
    assert (found["a"].batch_size, found["b"][0] is right) == (3, True)
    combined = CombinedLoader([small, right], "min_size")
    again = resized(combined, 3)
    assert again is not combined
    assert (again._mode, [one.batch_size for one in again.flattened]) == ("min_size", [3, 3])
    assert combined.flattened[0] is small


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        ([1, 2], "no DataLoader of torch"),
        (DataLoader(range(4), batch_size=None), "dataset makes the batches"),  # type: ignore[arg-type]
        (
            DataLoader(
                range(4), batch_sampler=type("Mine", (BatchSampler,), {})(SequentialSampler(range(4)), 2, False)
            ),  # type: ignore[arg-type]
            "its Mine makes the batches",
        ),
    ],
)
def test_the_reason_is_told(loader: Any, reason: str) -> None:
    with pytest.raises(MisconfigurationException, match=reason):
        resized_loader(loader, 3)


def test_the_samples_of_a_rank() -> None:
    streams = DataLoader(_Endless(), 2)
    listed: Any = [DataLoader(range(9), 2), DataLoader(range(7), 2, sampler=SubsetRandomSampler(range(5)))]  # type: ignore[arg-type]
    assert samples_at_hand(listed, 2) == 5  # samplers are those of the rank
    assert samples_at_hand([streams], 2) is None
    assert samples_at_hand([streams, *listed], 1) == 5
    assert size_of_loaders(listed) == 2


def test_the_owner_s_size_is_set_wherever_it_has_one() -> None:
    class Both(pl.LightningDataModule):
        def __init__(self, batch_size: int = 4) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.batch_size = batch_size

    class Fixed(pl.LightningDataModule):
        batch_size = property(lambda self: 6)

    both, fixed, none = Both(), Fixed(), pl.LightningDataModule()
    for owner in (both, fixed, none, None):
        set_size_of_owner(owner, 9)
    assert (both.batch_size, both.hparams["batch_size"], size_of_owner(both)) == (9, 9, 9)
    assert (fixed.batch_size, size_of_owner(none), size_of_owner(None)) == (6, None, None)
    assert not hasattr(none, "batch_size")

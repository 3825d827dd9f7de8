"""The same batches and the same draws as the user's loader, whatever the settings of both.

The oracle is the user's loader itself, made a second time from the same seed and iterated as it is.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler
from torch.utils.data.distributed import DistributedSampler

from lightning_speedkit.data.settings.loader_settings import LoaderSettings
from lightning_speedkit.data.settings.settled_loader import SettledLoader, settle, why_not_settled
from tests.data.processes import wait_until

NUMBERS = torch.arange(11)

NONE = LoaderSettings(num_workers=0)
TWO = LoaderSettings(num_workers=2, prefetch_factor=4)
KEPT = LoaderSettings(num_workers=1, prefetch_factor=2, persistent_workers=True)
GIVEN: tuple[dict[str, Any], ...] = (
    {},
    {"num_workers": 1},
    {"num_workers": 2, "prefetch_factor": 1},
    {"num_workers": 1, "persistent_workers": True},
)


class _Eager(Sampler[int]):
    """Draws when it is begun, not when it is first asked."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(11).tolist())

    def __len__(self) -> int:
        return 11


class _EagerBatches(_Eager):
    def __iter__(self) -> Iterator[Any]:
        return iter([[a, b] for a, b in torch.randperm(10).view(-1, 2).tolist()])

    def __len__(self) -> int:
        return 5


def _loader(kind: str, **settings: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    shapes: dict[str, dict[str, Any]] = {
        "in order": {"batch_size": 3},
        "shuffled": {"batch_size": 3, "shuffle": True},
        "shuffled by its generator": {"batch_size": 3, "shuffle": True, "generator": generator},
        "dropping the last": {"batch_size": 4, "shuffle": True, "drop_last": True, "generator": generator},
        "single samples": {"batch_size": None, "sampler": _Eager()},
        "eager sampler": {"batch_size": 2, "sampler": _Eager()},
        "eager batches": {"batch_sampler": _EagerBatches()},
        "batch sampler": {"batch_sampler": BatchSampler(RandomSampler(NUMBERS), 4, False)},  # type: ignore[arg-type]
        "distributed": {"batch_size": 2, "sampler": DistributedSampler(NUMBERS, 2, 1, seed=3)},  # type: ignore[arg-type]
    }
    return DataLoader(NUMBERS, **shapes[kind], **settings)  # type: ignore[arg-type]


KINDS = (
    "in order",
    "shuffled",
    "shuffled by its generator",
    "dropping the last",
    "single samples",
    "eager sampler",
    "eager batches",
    "batch sampler",
    "distributed",
)


def _epochs(loader: DataLoader[Any], batches: int | None) -> list[Any]:
    """Three epochs, as Lightning goes through them: whole, or stopped after so many batches, with draws between."""
    torch.manual_seed(9)
    seen: list[Any] = []
    for epoch in range(3):
        iterator = iter(loader)
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)  # Lightning does so after it made the first iterator
        seen.append(torch.rand(1).item())  # a callback
        for batch in iterator if batches is None else itertools.islice(iterator, batches):
            seen.append(batch.tolist())
            seen.append(torch.rand(1).item())  # dropout
    del iterator
    if loader.generator is not None:
        seen.append(torch.rand(1, generator=loader.generator).item())
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_batches_and_draws_are_those_of_the_loader_without_workers(kind: str) -> None:
    for settings, batches in ((TWO, None), (KEPT, 2), (TWO, 1)):
        expected = _epochs(_loader(kind), batches)
        assert _epochs(settle(_loader(kind), settings), batches) == expected, settings


@pytest.mark.parametrize("given", GIVEN[1:], ids=str)
@pytest.mark.parametrize("settings", [NONE, TWO, KEPT], ids=lambda s: str(s.num_workers))
def test_batches_and_draws_are_those_of_the_loader_with_workers(
    given: dict[str, Any], settings: LoaderSettings
) -> None:
    for kind, batches in (("shuffled", None), ("shuffled by its generator", 1), ("eager batches", None)):
        expected = _epochs(_loader(kind, **given), batches)
        assert _epochs(settle(_loader(kind, **given), settings), batches) == expected, kind


def test_the_test_sees_what_it_is_about() -> None:
    """Plain loaders with other workers are not the same: else nothing would be to do."""
    expected = _epochs(_loader("shuffled"), None)
    assert _epochs(_loader("shuffled", num_workers=1, persistent_workers=True), None) != expected


def test_all_other_settings_are_kept() -> None:
    def collate(samples: list[Any]) -> Any:
        return samples

    def init(worker: int) -> None:
        return None

    loader: DataLoader[Any] = DataLoader(
        NUMBERS,  # type: ignore[arg-type]
        batch_size=3,
        drop_last=True,
        shuffle=True,
        collate_fn=collate,
        worker_init_fn=init,
        generator=torch.Generator(),
        timeout=7,
        num_workers=1,
        multiprocessing_context="spawn",
        in_order=False,
    )
    settled = settle(loader, TWO)
    for name in ("dataset", "batch_size", "drop_last", "sampler", "collate_fn", "worker_init_fn", "generator"):
        assert getattr(settled, name) is getattr(loader, name), name
    assert (settled.timeout, settled.in_order, settled.num_workers, settled.prefetch_factor) == (7, False, 2, 4)
    assert settled.multiprocessing_context.get_start_method() == "spawn"
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (1, 2, False)
    assert len(settled) == len(loader)
    without = settle(loader, NONE)
    assert (without.timeout, without.multiprocessing_context, without.prefetch_factor) == (0, None, None)


def test_pinned_memory_is_asked_for_by_either() -> None:
    pinned = dataclasses.replace(NONE, pin_memory=True)
    assert settle(_loader("in order"), pinned).pin_memory
    assert settle(_loader("in order", pin_memory=True), NONE).pin_memory
    assert not settle(_loader("in order"), NONE).pin_memory


class _Level(Dataset[int]):
    """What a sample is depends on an attribute that the training process sets."""

    def __init__(self) -> None:
        self.level = 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return self.level


def _processes() -> set[int | None]:
    return {child.pid for child in multiprocessing.active_children()}


def test_kept_workers_are_kept_until_an_attribute_of_the_dataset_is_set() -> None:
    dataset = _Level()
    part = torch.utils.data.Subset(dataset, [0, 1])
    settled = settle(DataLoader(part, batch_size=2), KEPT)
    assert [batch.tolist() for batch in settled] == [[0, 0]]
    workers = _processes()
    assert [batch.tolist() for batch in settled] == [[0, 0]]
    assert _processes() == workers != set()
    dataset.level = 3
    assert [batch.tolist() for batch in settled] == [[3, 3]]
    gc.collect()
    assert wait_until(lambda: len(_processes()) == 1)
    assert _processes() != workers
    settled.close()
    gc.collect()
    assert wait_until(lambda: _processes() == set())
    assert [batch.tolist() for batch in settled] == [[3, 3]]  # and it can be used again
    settled.close()


def test_workers_that_are_not_kept_end_with_the_epoch() -> None:
    settled = settle(_loader("shuffled"), TWO)
    list(settled)
    gc.collect()
    assert wait_until(lambda: _processes() == set())


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class _OwnKind(DataLoader[Any]):
    pass


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        ([1, 2], "a list is no torch DataLoader"),
        (None, "a NoneType is no torch DataLoader"),
        (_OwnKind([1]), "a _OwnKind is a DataLoader of its own kind"),  # type: ignore[arg-type]
        (DataLoader(_Stream()), "an IterableDataset"),
        (settle(DataLoader([1]), NONE), "were chosen already"),  # type: ignore[arg-type]
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_settled_says_why(loader: Any, reason: str) -> None:
    assert reason in why_not_settled(loader)
    with pytest.raises(TypeError, match=reason):
        settle(loader, NONE)


def test_a_dataset_without_length_is_left_alone() -> None:
    class Endless(Dataset[int]):
        def __getitem__(self, index: int) -> int:
            return index

    loader = DataLoader(Endless(), sampler=range(3))
    assert why_not_settled(loader) == "an Endless has no length"
    assert not isinstance(loader, SettledLoader)


def test_an_exception_of_the_dataset_comes_where_it_belongs() -> None:
    class Breaks(_Level):
        def __getitem__(self, index: int) -> int:
            if index == 2:
                raise KeyError("the third sample")
            return index

    for settings in (NONE, KEPT):
        settled = settle(DataLoader(Breaks(), batch_size=1), settings)
        batches = iter(settled)
        assert [next(batches).tolist() for _ in range(2)] == [[0], [1]]
        with pytest.raises(KeyError, match="the third sample"):
            next(batches)
        del batches
        settled.close()

"""A stream that ends early: a size counts only if a whole batch of it was there."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_speedkit.memory.batch_size import BatchSizeSearch
from lightning_speedkit.memory.batch_size_find import BatchSizeTrial, trial_table
from lightning_speedkit.memory.batch_size_stream import only_whole_batches
from tests.memory.scarce import Net, dataset, fit


class Stream(IterableDataset[Any]):
    def __init__(self, samples: int) -> None:
        self.x, self.y = dataset(max(1, samples)).tensors
        self.samples = samples

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.x[: self.samples], self.y[: self.samples], strict=True)


def _given(samples: int, size: int = 4) -> Any:
    return DataLoader(Stream(samples), size), DataLoader(dataset(20), batch_size=5)


@pytest.mark.parametrize("size", [4, 16])
def test_no_size_is_found_that_no_batch_had(size: int) -> None:
    net, search = Net(), BatchSizeSearch(limit=64)
    with pytest.warns(UserWarning, match=r"no whole batch of 21 samples: the stream is too short\. It takes 20"):
        fit(search, net, _given(20, size), max_epochs=1)
    assert search.batch_size == 20
    tried = {trial.size: (trial.fits, trial.failed_in) for trial in search.trials}
    assert (tried[20], tried[21], tried[32]) == ((True, ""), (False, "loading"), (False, "loading"))
    assert net.sizes == {20}  # that the run itself had
    assert net.trained == 20


def test_memory_that_runs_out_before_the_stream_does_is_told_as_before() -> None:
    net, search = Net(13), BatchSizeSearch(limit=64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="(.*does not have many workers|`isinstance|.*logging interval).*")
        fit(search, net, _given(60), max_epochs=1)
    assert search.batch_size == 13
    assert {trial.failed_in for trial in search.trials} == {"", "training"}
    assert net.sizes == {13, 60 % 13}  # the run has its short last batch


def test_a_short_last_batch_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now, sizes = [0.0], list[int]()

    class Timed(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            sizes.append(len(batch[0]))
            now[0] += len(batch[0])  # as many seconds as samples: no size is faster than another
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr("lightning_speedkit.memory.batch_size_trial.time.perf_counter", lambda: now[0])
    search = BatchSizeSearch(start=8, limit=64, target="throughput")
    with pytest.warns(UserWarning, match="no whole batch of 32"):
        fit(search, Timed(), _given(20), max_epochs=1)
    assert [(t.size, t.seconds, t.fits) for t in search.trials] == [(8, 8, True), (16, 16, True), (32, None, False)]
    assert search.batch_size == 8
    assert sizes == [8, 8, 8, 16, 16, 16, 8, 8, 4]  # three steps of each trial, and the run


def test_loading_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    class Slow(Stream):
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            for one in super().__iter__():
                now[0] += 100.0
                yield one

    class Timed(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            now[0] += 1.0
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr("lightning_speedkit.memory.batch_size_trial.time.perf_counter", lambda: now[0])
    search = BatchSizeSearch(start=8, limit=8)
    fit(search, Timed(), (DataLoader(Slow(60), 8), DataLoader(dataset(20), batch_size=5)), max_epochs=1)
    assert [trial.seconds for trial in search.trials] == [1.0]


def test_the_margin_has_to_be_there_too_and_an_empty_stream_is_told() -> None:
    search = BatchSizeSearch(limit=64, margin=0.25)
    with pytest.warns(UserWarning, match="no whole batch of 17"):
        fit(search, Net(), _given(20), max_epochs=1)
    assert search.batch_size == 16  # with 20 samples
    with pytest.raises(ValueError, match="There are no training batches"):
        fit(BatchSizeSearch(limit=64), Net(), _given(0))


def test_each_worker_leaves_out_its_own_and_the_given_loader_stays() -> None:
    class Numbers(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            info = torch.utils.data.get_worker_info()
            return iter(range(5 if info is None else 5 * (info.id + 1)))  # 5 and 10

    given, sized = DataLoader(Numbers(), 3, num_workers=2), DataLoader(range(5), 3)  # type: ignore[arg-type]
    combined = CombinedLoader([given, sized], "sequential")
    assert only_whole_batches(combined)
    assert [len(batch) for batch, *_ in combined] == [3, 3, 3, 3, 3, 2]
    assert combined.flattened[1] is sized
    assert not given.drop_last
    assert not only_whole_batches(CombinedLoader(sized))


def test_the_table_says_so() -> None:
    assert "32  no whole batch  " in trial_table([BatchSizeTrial(32, 32, False, "loading")])

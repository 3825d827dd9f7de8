"""The loaders that a DataModule makes: with its settings, for its ranks, and for a Trainer that resumes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

from lightning_speedkit.data import RingLoader, SpeedkitDataModule
from lightning_speedkit.data.datamodule_loaders import shards
from tests.data.numbers import Numbers, Recorder, flat, trainer


def test_without_a_trainer_there_is_one_rank() -> None:
    data = SpeedkitDataModule()
    assert shards(data) == {"num_replicas": 1, "rank": 0}
    data.trainer = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 3, "rank": 2})  # type: ignore[assignment]
    assert shards(data) == {"num_replicas": 3, "rank": 2}


def test_a_loader_that_nobody_iterates_is_closed_when_another_is_made(tmp_path: Path) -> None:
    data = Numbers(tmp_path, batch_size=4, loader="processes", num_workers=1)
    data.prepare_data()
    first, val = data.train_dataloader(), data.val_dataloader()
    batches = iter(first)
    next(batches)
    second = data.train_dataloader()
    assert data._loaders == [first, val, second]
    assert first.worker_pids
    batches.close()
    third = data.train_dataloader()
    assert data._loaders == [val, third]
    assert first.worker_pids == []


def test_settings_of_torchs_loader(tmp_path: Path) -> None:
    settings: Any = {"batch_size": 7, "num_workers": 2, "prefetch_factor": 5, "start_method": "forkserver"}
    data = Numbers(tmp_path, **settings, loader="torch", drop_last=True)
    data.prepare_data()
    train, val = data.train_dataloader(), data.val_dataloader()
    for loader in (train, val):
        assert (loader.batch_size, loader.num_workers, loader.prefetch_factor) == (7, 2, 5)
        assert loader.persistent_workers
        assert loader.multiprocessing_context.get_start_method() == "forkserver"
        assert not loader.pin_memory
    assert (len(train), len(val)) == (3, 1)  # 24 = 3 x 7 + 3; evaluation never drops a sample
    assert isinstance(train.sampler, DistributedSampler)
    assert Numbers(tmp_path, loader="torch", pin_memory=True).val_dataloader().pin_memory
    plain = Numbers(tmp_path, loader="torch").train_dataloader()
    assert (plain.num_workers, plain.persistent_workers, plain.prefetch_factor) == (0, False, None)


def test_settings_of_the_ring_loader(tmp_path: Path) -> None:
    settings: Any = {"batch_size": 7, "num_workers": 2, "prefetch_factor": 5, "start_method": "forkserver"}
    data = Numbers(tmp_path, **settings, drop_last=True, remainder="drop")
    data.prepare_data()
    train, val = data.train_dataloader(), data.val_dataloader()
    for loader in (train, val):
        assert isinstance(loader, RingLoader)
        assert (loader.batch_size, loader.num_workers, loader.prefetch_factor) == (7, 2, 5)
        assert loader.start_method == "forkserver"
    assert (len(train), len(val)) == (3, 1)
    assert (train.order.remainder, val.order.remainder) == ("drop", "exact")
    assert (train.order.drop_last, val.order.drop_last) == (True, False)


class Drawing(SpeedkitDataModule):
    """As many samples as a test needs."""

    def dataset(self, split: str) -> Any:
        return range(4)


def _first_seed(data: SpeedkitDataModule, split: str, rank: int = 0, epoch: int = 0) -> int:
    data.loader = "torch"
    data.trainer = SimpleNamespace(  # type: ignore[assignment]
        distributed_sampler_kwargs={"num_replicas": 2, "rank": rank},
        current_epoch=epoch,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        state=SimpleNamespace(fn=None),
    )
    return int(torch.randint(1 << 40, (1,), generator=getattr(data, f"{split}_dataloader")().generator))


@pytest.mark.parametrize("split", ["train", "val"])
def test_workers_numbers_differ_by_seed_rank_and_epoch(split: str) -> None:
    places = [(seed, rank, epoch) for seed in (0, 1, 2**32 - 1) for rank in (0, 1) for epoch in (0, 1, 5)]
    found = [_first_seed(Drawing(seed=seed), split, rank, epoch) for seed, rank, epoch in places]
    assert len(set(found)) == len(places)
    assert found == [_first_seed(Drawing(seed=seed), split, rank, epoch) for seed, rank, epoch in places]


def test_a_run_that_was_ended_within_an_epoch_says_what_is_skipped(tmp_path: Path) -> None:
    """5 steps an epoch; stopped by max_steps after 2, and saved when Lightning counts the epoch as done."""
    first = trainer(max_steps=2, limit_val_batches=0)
    first.fit(Recorder(), datamodule=Numbers(tmp_path, batch_size=5))
    first.save_checkpoint(tmp_path / "a.ckpt")
    model = Recorder()
    with pytest.warns(UserWarning, match="saved after 10 of the 24 samples of epoch 0, and counts that epoch as done"):
        trainer(max_epochs=2, limit_val_batches=0).fit(
            model, datamodule=Numbers(tmp_path, batch_size=5), ckpt_path=tmp_path / "a.ckpt"
        )
    assert sorted(flat(model.seen["train"])) == list(range(24))


@pytest.mark.parametrize("limit", [2, 0.5])
def test_epochs_that_are_limited_are_not_called_ended(
    tmp_path: Path, limit: float, recwarn: pytest.WarningsRecorder
) -> None:
    first = trainer(max_epochs=1, limit_train_batches=limit, limit_val_batches=0)
    first.fit(Recorder(), datamodule=Numbers(tmp_path, batch_size=5))
    first.save_checkpoint(tmp_path / "a.ckpt")
    model = Recorder()
    trainer(max_epochs=2, limit_train_batches=limit, limit_val_batches=0).fit(
        model, datamodule=Numbers(tmp_path, batch_size=5), ckpt_path=tmp_path / "a.ckpt"
    )
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1)).tolist()
    assert model.seen["train"] == [order[:5], order[5:10]]
    assert not [warning for warning in recwarn if "counts that epoch as done" in str(warning.message)]

"""The DataModules with a Trainer: what is served, in which order, on one process and on two."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import DistributedSampler

from lightning_speedkit.data import LMDBDataModule, SpeedkitDataModule
from tests.data.numbers import SIZES, Numbers, Recorder, flat, trainer
from tests.two_ranks import on_two_ranks


def epochs_of(data: SpeedkitDataModule, epochs: int = 2) -> list[list[int]]:
    model = Recorder()
    trainer(max_epochs=epochs, limit_val_batches=0).fit(model, datamodule=data)
    seen = flat(model.seen["train"])
    return [seen[i : i + SIZES["train"]] for i in range(0, len(seen), SIZES["train"])]


@pytest.mark.parametrize("workers", [0, 2])
def test_all_stages(tmp_path: Path, workers: int) -> None:
    model, data = Recorder(), Numbers(tmp_path / "stores", batch_size=4, num_workers=workers)
    run = trainer(max_epochs=2)
    run.fit(model, datamodule=data)
    run.validate(model, datamodule=data)
    run.test(model, datamodule=data)
    predictions = run.predict(model, datamodule=data)
    first, second = flat(model.seen["train"][:6]), flat(model.seen["train"][6:])
    assert sorted(first) == sorted(second) == list(range(24))
    assert first != second
    assert flat(model.seen["val"]) == list(range(6)) * 3
    assert model.seen["test"] == [[0, 1, 2, 3], [4, 5, 6]]
    assert model.seen["predict"] == [[0, 1, 2, 3], [4]]
    assert len(predictions) == 2
    assert {file.name for file in data.root.iterdir()} == {f"{split}.lmdb" for split in SIZES}


def test_the_order_is_a_function_of_seed_and_epoch(tmp_path: Path) -> None:
    def expected(seed: int) -> list[list[int]]:  # torch's documented order of a DistributedSampler of one rank
        return [torch.randperm(24, generator=torch.Generator().manual_seed(seed + e)).tolist() for e in (0, 1)]

    first = epochs_of(Numbers(tmp_path, batch_size=5, seed=3))
    torch.manual_seed(99)
    assert epochs_of(Numbers(tmp_path, batch_size=5, seed=3, num_workers=1)) == first == expected(3)
    assert epochs_of(Numbers(tmp_path, batch_size=5, seed=4)) == expected(4) != first
    assert epochs_of(Numbers(tmp_path, batch_size=5, shuffle=False)) == [list(range(24))] * 2


def test_a_resumed_run_sees_the_order_of_its_epoch(tmp_path: Path) -> None:
    torch.manual_seed(1)
    whole = Recorder()
    trainer(max_epochs=3, limit_val_batches=0).fit(whole, datamodule=Numbers(tmp_path, batch_size=6))
    torch.manual_seed(1)
    first, second = Recorder(), Recorder()
    run = trainer(max_epochs=1, limit_val_batches=0)
    run.fit(first, datamodule=Numbers(tmp_path, batch_size=6))
    run.save_checkpoint(tmp_path / "a.ckpt")
    resumed = trainer(max_epochs=3, limit_val_batches=0)
    resumed.fit(second, datamodule=Numbers(tmp_path, batch_size=6), ckpt_path=tmp_path / "a.ckpt")
    assert first.seen["train"] + second.seen["train"] == whole.seen["train"]
    assert torch.equal(second.layer.weight, whole.layer.weight)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_global_random_state_is_neither_read_nor_changed(tmp_path: Path, workers: int) -> None:
    data = Numbers(tmp_path, batch_size=5, num_workers=workers)
    data.prepare_data()
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        list(loader)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


class RandomTransform(Numbers):
    def transform(self, split: str) -> Callable[[Any], Any]:
        return lambda sample: torch.randint(1 << 30, (1,))


def test_workers_draw_their_own_numbers_from_the_seed(tmp_path: Path) -> None:
    def drawn(seed: int) -> list[int]:
        data = RandomTransform(tmp_path, batch_size=1, num_workers=2, seed=seed, shuffle=False)
        data.prepare_data()
        return [int(batch) for batch in data.train_dataloader()]

    first = drawn(1)
    torch.manual_seed(5)
    assert drawn(1) == first
    assert len(set(first)) == 24
    assert drawn(2) != first


def test_overfitting_takes_the_same_first_batches_each_time(tmp_path: Path) -> None:
    model = Recorder()
    trainer(max_epochs=2, overfit_batches=2).fit(model, datamodule=Numbers(tmp_path, batch_size=4))
    assert model.seen["train"] == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2


def test_a_second_fit_with_the_same_objects(tmp_path: Path) -> None:
    model, data, run = Recorder(), Numbers(tmp_path, batch_size=4, num_workers=1), trainer(max_epochs=1)
    run.fit(model, datamodule=data)
    run.fit_loop.max_epochs = 2
    run.fit(model, datamodule=data)
    assert [sorted(flat(model.seen["train"][i : i + 6])) for i in (0, 6)] == [list(range(24))] * 2


def test_loader_settings(tmp_path: Path) -> None:
    data = Numbers(tmp_path, batch_size=7, num_workers=2, prefetch_factor=5, drop_last=True)
    data.prepare_data()
    train, val = data.train_dataloader(), data.val_dataloader()
    for loader in (train, val):
        assert (loader.batch_size, loader.num_workers, loader.prefetch_factor) == (7, 2, 5)
        assert loader.persistent_workers
        assert not loader.pin_memory
    assert (len(train), len(val)) == (3, 1)  # 24 = 3 x 7 + 3; evaluation never drops a sample
    assert isinstance(train.sampler, DistributedSampler)
    assert Numbers(tmp_path, pin_memory=True).val_dataloader().pin_memory
    plain = Numbers(tmp_path).train_dataloader()
    assert (plain.num_workers, plain.persistent_workers, plain.prefetch_factor) == (0, False, None)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"batch_size": 0}, ValueError),
        ({"batch_size": 2.0}, TypeError),
        ({"batch_size": True}, TypeError),
        ({"num_workers": -1}, ValueError),
        ({"prefetch_factor": 0}, ValueError),
        ({"seed": -1}, ValueError),
    ],
)
def test_arguments_are_checked(tmp_path: Path, arguments: dict[str, Any], error: type[Exception]) -> None:
    name, value = next(iter(arguments.items()))
    with pytest.raises(error, match=f"{name} must be .*got {value}"):
        LMDBDataModule(tmp_path, **arguments)


def test_any_dataset_can_be_served() -> None:
    class Squares(SpeedkitDataModule):
        def dataset(self, split: str) -> list[tuple[torch.Tensor, int]] | None:
            return [(torch.full((4,), i / 10), i) for i in range(24)] if split == "train" else None

    class NoDataset(SpeedkitDataModule):
        def dataset(self, split: str) -> None:
            return None

    assert sorted(epochs_of(Squares(batch_size=8), epochs=1)[0]) == list(range(24))
    with pytest.raises(MisconfigurationException, match="NoDataset has no dataset for the split 'train'"):
        trainer(max_epochs=1).fit(Recorder(), datamodule=NoDataset())
    with pytest.raises(NotImplementedError, match="must define dataset"):
        SpeedkitDataModule().train_dataloader()


Seen = tuple[list[list[int]], list[list[int]]]


def _fit_on_a_rank(root: str) -> list[Seen]:
    torch.manual_seed(int(os.environ["RANK"]))  # ranks that differ here must still agree on the order
    seen = []
    for shuffle, workers in ((True, 1), (False, 0)):
        model, data = Recorder(), Numbers(root, batch_size=4, shuffle=shuffle, num_workers=workers, seed=2)
        trainer(max_epochs=2, devices=2, strategy="ddp").fit(model, datamodule=data)
        seen.append((model.seen["train"], model.seen["val"]))
    return seen


def test_two_ranks_read_disjoint_halves_of_one_order(tmp_path: Path) -> None:
    first, second = on_two_ranks(_fit_on_a_rank, str(tmp_path / "stores"))
    for shuffle, (train, val), (other_train, other_val) in zip((True, False), first, second, strict=True):
        for epoch in range(2):
            halves = [flat(part[3 * epoch : 3 * epoch + 3]) for part in (train, other_train)]
            order = torch.randperm(24, generator=torch.Generator().manual_seed(2 + epoch)).tolist()
            order = order if shuffle else list(range(24))
            assert halves == [order[0::2], order[1::2]]
        assert sorted(flat(val[:1] + other_val[:1])) == list(range(6))

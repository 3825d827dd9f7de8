"""The numbers of a batch: a function of the seed alone; the tuples of a resumed run are those of the unbroken one."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_speedkit.data.device.batch_random import batch_generator, contained_random, training_seed
from tests.two_ranks import on_two_ranks

BATCHES = 6


class SeedRecorder(LightningDataModule):
    """Records the seed of each training batch where Lightning has it transferred, with the batch's own number."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds: list[tuple[int, ...]] = []

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.arange(float(BATCHES)), batch_size=1)

    val_dataloader = train_dataloader

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training:
            self.seeds.append(training_seed(self.trainer, 7))
        return batch


class Linear(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.indices: list[tuple[int, int]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.indices.append((self.current_epoch, batch_idx))
        return self.layer(batch[:, None]).square().mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("loss", self.layer(batch[:, None]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fitted(folder: Path, *callbacks: Callback, ckpt_path: Path | None = None, **arguments: Any) -> tuple[Any, Any]:
    data, model = SeedRecorder(), Linear()
    arguments = {"max_epochs": 3, "accelerator": "cpu", "devices": 1, "num_sanity_val_steps": 1, **arguments}
    trainer = Trainer(
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[*callbacks],
        **arguments,
    )
    trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)
    return data.seeds, model.indices


SETTINGS: list[dict[str, Any]] = [
    {},
    {"accumulate_grad_batches": 4},
    {"val_check_interval": 2},
    {"accumulate_grad_batches": 2, "val_check_interval": 3, "limit_train_batches": 5},
    {"limit_val_batches": 0},
]
SAVED: list[dict[str, Any]] = [
    {"every_n_train_steps": 1},
    {"every_n_epochs": 1, "save_on_train_epoch_end": True},
    {"every_n_epochs": 1, "save_on_train_epoch_end": False},
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("saved", SAVED, ids=["step", "train epoch end", "validation end"])
@pytest.mark.parametrize("settings", SETTINGS, ids=["plain", "accumulated", "validated", "all", "no validation"])
def test_a_resumed_run_has_the_seeds_of_the_unbroken_one(
    tmp_path: Path, settings: dict[str, Any], saved: dict[str, Any]
) -> None:
    checkpoints = ModelCheckpoint(tmp_path, "{epoch}-{step}", save_top_k=-1, monitor=None, **saved)
    whole, indices = fitted(tmp_path, checkpoints, **settings)
    count = settings.get("limit_train_batches", BATCHES)
    expected = [(7, epoch, batch, 0) for epoch in range(3) for batch in range(count)]
    assert whole == expected
    assert [(epoch, batch) for _, epoch, batch, _ in whole] == indices
    tried = sorted(tmp_path.glob("*.ckpt"))
    for path in tried:
        resumed, _ = fitted(tmp_path, ckpt_path=path, **settings)
        done = torch.load(path, weights_only=True)["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["ready"]
        assert resumed == expected[done:]
    if settings.get("limit_val_batches") != 0 or saved.get("save_on_train_epoch_end", True):
        assert len(tried) >= 3


def test_sanity_check_and_validation_have_no_seed_of_training(tmp_path: Path) -> None:
    seeds, _ = fitted(tmp_path, enable_checkpointing=False, max_epochs=1, val_check_interval=1)
    assert seeds == [(7, 0, batch, 0) for batch in range(BATCHES)]


def _seeds_of_a_rank() -> Any:
    return fitted(Path(), devices=2, strategy="ddp", max_epochs=2, enable_checkpointing=False)[0]


def test_each_rank_has_its_own() -> None:
    for rank, seeds in enumerate(on_two_ranks(_seeds_of_a_rank)):
        assert seeds == [(7, epoch, batch, rank) for epoch in range(2) for batch in range(BATCHES // 2)]


def test_ranks_that_share_a_batch_have_the_same() -> None:
    loop = SimpleNamespace(batch_idx=-1)
    trainer: Any = SimpleNamespace(
        current_epoch=2, fit_loop=loop, global_rank=3, distributed_sampler_kwargs={"num_replicas": 2, "rank": 1}
    )
    assert training_seed(trainer, 5) == (5, 2, 0, 1)
    trainer.distributed_sampler_kwargs = None
    assert training_seed(trainer, 5) == (5, 2, 0, 3)


def drawn(*seed: int) -> tuple[float, ...]:
    return tuple(torch.rand(4, generator=batch_generator(seed)).tolist())


def test_every_number_and_place_of_a_seed_counts() -> None:
    seeds = [(), (0,), (0, 0), (1,), (1, 0), (0, 1), (0, 0, 0, 1), (2**32,), (2**32 + 1,), (0, 1, 0), (2**64 - 1,)]
    assert len({drawn(*seed) for seed in seeds}) == len(seeds)
    assert len({drawn(0, epoch, batch, rank) for epoch in range(8) for batch in range(50) for rank in range(4)}) == 1600
    assert drawn(1, 2) == drawn(np.int64(1), np.uint8(2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("number", "error"), [(-1, ValueError), (2**64, ValueError), (1.0, TypeError), (True, TypeError)]
)
def test_what_is_no_seed(number: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="seed must hold integers"):
        batch_generator((0, number))
    with pytest.raises(error, match="seed must hold integers"), contained_random((number,)):
        raise AssertionError


def states() -> tuple[Any, ...]:
    numpy = np.random.get_state(legacy=False)
    return random.getstate(), numpy["state"]["key"].tobytes(), numpy["state"]["pos"], torch.get_rng_state().tolist()


def numbers() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_global_state_is_contained_and_reproduced() -> None:
    before = states()
    with contained_random((1, 2)):
        first = numbers()
    assert states() == before
    numbers()
    with contained_random((1, 2)):
        assert numbers() == first
    with contained_random((2, 1)):
        second = numbers()
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_it_is_contained_when_the_code_fails() -> None:
    before = states()
    with pytest.raises(ZeroDivisionError), contained_random((1,)):
        1 / (numbers()[0] * 0)
    assert states() == before


def test_another_bit_generator_of_numpy_is_left_as_it_is() -> None:
    legacy = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(5))
        before = np.random.get_state(legacy=False)
        with contained_random((1,)):
            np.random.rand()
        assert np.random.get_state(legacy=False) == before
    finally:
        np.random.set_bit_generator(legacy)


@pytest.mark.gpu
def test_the_state_of_a_cuda_device_is_contained_too() -> None:
    before = torch.cuda.get_rng_state()
    with contained_random((1,), "cuda:0"):
        first = torch.rand(3, device="cuda")
    assert torch.equal(torch.cuda.get_rng_state(), before)
    torch.rand(3, device="cuda")
    with contained_random((1,), "cuda:0"):
        assert torch.equal(torch.rand(3, device="cuda"), first)

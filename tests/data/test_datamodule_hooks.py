"""What workers and the Trainer get of a DataModule."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import torch

from lightning_speedkit.data import DeviceTransform, SpeedkitDataModule
from lightning_speedkit.data.datamodule_hooks import CollateOfDataModule, TransformOnDevice


class Sums(SpeedkitDataModule):
    factor = 1

    def collate(self, samples: Any) -> Any:
        return self.factor * sum(samples), self.trainer is None


def test_a_collate_travels_without_trainer_and_loaders() -> None:
    data = Sums()
    data.trainer = SimpleNamespace(leads_to=lambda: None)  # type: ignore[assignment]
    data._loaders = [lambda: None]  # type: ignore[list-item]
    data.factor = 3
    here = CollateOfDataModule(data)
    there = pickle.loads(pickle.dumps(here))
    assert here([1, 2]) == (9, False)
    assert there([1, 2]) == (9, True)
    assert data._loaders


def _seen(seeds: list[tuple[bool, tuple[int, ...]]]) -> Any:
    class Notes(DeviceTransform):
        def __call__(self, batch: Any, *, training: bool, seed: Any) -> Any:
            seeds.append((training, tuple(seed)))
            return batch + 1

    return Notes()


def test_the_transform_gets_the_seed_of_the_batch_and_the_modules_hook_its_result() -> None:
    seeds: list[tuple[bool, tuple[int, ...]]] = []
    data = SpeedkitDataModule(seed=7)
    hook = TransformOnDevice(data, _seen(seeds))
    assert hook(torch.tensor(1), 0).item() == 1  # no Trainer: nothing is on its way to a device
    module = SimpleNamespace(on_after_batch_transfer=lambda batch, index: (batch, index))
    data.trainer = SimpleNamespace(  # type: ignore[assignment]
        training=True,
        current_epoch=2,
        global_rank=1,
        fit_loop=SimpleNamespace(batch_idx=4),
        distributed_sampler_kwargs={"rank": 1},
        lightning_module=module,
    )
    batch, index = hook(torch.tensor(1), 3)
    assert (batch.item(), index) == (2, 3)
    assert seeds == [(True, (7, 2, 5, 1))]

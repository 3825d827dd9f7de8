"""What Lightning keeps private of its model parallel strategy is what the kit takes it for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn

from lightning_speedkit.measure.lightning_sharded import materialize, set_parallel_sizes
from tests.two_ranks import on_two_ranks


def _mesh(data: int, tensor: int) -> dict[str, int]:
    strategy = ModelParallelStrategy(data_parallel_size=7, tensor_parallel_size=7)
    trainer: Any = Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)
    strategy.connect(LightningModule())
    set_parallel_sizes(strategy, data, tensor)
    trainer.strategy.setup_environment()
    dist.barrier()  # rank 0 holds what the others read to make their groups
    return {name: strategy.device_mesh[name].size() for name in ("data_parallel", "tensor_parallel")}


def test_the_sizes_are_those_of_the_mesh() -> None:
    for rank in on_two_ranks(_mesh, 1, 2, timeout=60.0):
        assert rank == {"data_parallel": 1, "tensor_parallel": 2}


def test_a_strategy_without_sizes_says_so() -> None:
    with pytest.raises(AttributeError, match=r"no ModelParallelStrategy\._data_parallel_size"):
        set_parallel_sizes(object(), 1, 2)  # type: ignore[arg-type]


def test_parameters_on_meta_get_values_and_others_stay() -> None:
    with torch.device("meta"):
        layer = nn.Linear(3, 2)
    materialize(layer, torch.device("cpu"))
    assert torch.isfinite(layer.weight).all()
    weight = (there := nn.Linear(3, 2)).weight
    before = weight.detach().clone()
    materialize(there, torch.device("cpu"))
    assert there.weight is weight
    assert torch.equal(weight, before)

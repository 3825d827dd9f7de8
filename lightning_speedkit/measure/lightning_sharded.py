"""What Lightning keeps private of its ``ModelParallelStrategy``.

Read on Lightning 2.6.6. ``tests/measure/test_lightning_sharded.py`` checks it against a real run, so that a Lightning
that does otherwise fails there and not in a user's training.
"""

from __future__ import annotations

import torch
from lightning.fabric.utilities.init import _materialize_distributed_module
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn

__all__ = ["materialize", "set_parallel_sizes"]


def set_parallel_sizes(strategy: ModelParallelStrategy, data: int, tensor: int) -> None:
    """The sizes of the device mesh that ``setup_environment`` makes.

    Sets ``_data_parallel_size`` and ``_tensor_parallel_size``.
    """
    for name, size in (("_data_parallel_size", data), ("_tensor_parallel_size", tensor)):
        if not hasattr(strategy, name):
            raise AttributeError(f"This version of Lightning has no ModelParallelStrategy.{name}.")
        setattr(strategy, name, size)


def materialize(module: nn.Module, device: torch.device) -> None:
    """Give parameters on the meta device memory and fresh values, by ``reset_parameters``; without any it does nothing.

    Calls ``lightning.fabric.utilities.init._materialize_distributed_module``.
    """
    _materialize_distributed_module(module, device)

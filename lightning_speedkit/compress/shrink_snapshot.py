"""Everything that shrinking changes, kept so that it can be put back exactly."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_speedkit.compress.shrink_resize import original_sizes, set_original_sizes
from lightning_speedkit.compress.shrink_sizes import named_tensors, set_tensors

__all__ = ["put_back", "take_snapshot"]


def take_snapshot(module: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Copies of all parameters, buffers and optimizer states, as plain data that a checkpoint can hold."""
    return {
        "tensors": {name: tensor.detach().clone() for name, tensor in named_tensors(module).items()},
        "optimizers": [
            [
                copy.deepcopy(dict(optimizer.state.get(p, {})))
                for group in optimizer.param_groups
                for p in group["params"]
            ]
            for optimizer in optimizers
        ],
        "original": original_sizes(module),
    }


def put_back(module: nn.Module, optimizers: Sequence[Optimizer], snapshot: Mapping[str, Any]) -> None:
    """Brings back the values and sizes of the snapshot; learning rates and other settings stay as they are."""
    tensors = named_tensors(module)
    values = {name: value.detach().clone().to(tensors[name].device) for name, value in snapshot["tensors"].items()}
    set_tensors(module, values)
    for optimizer, states in zip(optimizers, snapshot["optimizers"], strict=True):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for parameter, state in zip(parameters, states, strict=True):
            optimizer.state.pop(parameter, None)
            if state:
                optimizer.state[parameter] = {key: _placed(value, parameter) for key, value in state.items()}
    set_original_sizes(module, snapshot["original"])


def _placed(value: Any, parameter: Tensor) -> Any:
    # a checkpoint brings them on the CPU; a count of steps belongs there
    if isinstance(value, Tensor) and value.ndim == parameter.ndim and value.ndim > 0:
        return value.detach().clone().to(parameter.device)
    return copy.deepcopy(value)

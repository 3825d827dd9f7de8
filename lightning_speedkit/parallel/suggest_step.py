"""The loss of one batch: of a LightningModule's own step, or of a plain module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

__all__ = ["loss_of"]


def loss_of(module: nn.Module, batch: Any, loss: Callable[[Any, Any], Tensor] | None) -> Tensor:
    """The scalar to call ``backward`` on.

    >>> loss_of(nn.Linear(2, 1), torch.zeros(4, 2), None).shape
    torch.Size([])
    """
    if isinstance(module, LightningModule):
        if loss is not None:
            raise ValueError("loss belongs to a plain module; a LightningModule has its own in training_step.")
        if not module.automatic_optimization:
            raise ValueError("the module optimizes manually, so that its steps cannot be told apart.")
        step: Callable[..., Any] = module.training_step
        takes_index = is_param_in_hook_signature(step, "batch_idx", min_args=2)
        output = step(batch, 0) if takes_index else step(batch)
        return _scalar(output.get("loss") if isinstance(output, Mapping) else output, "training_step")
    if loss is not None:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise ValueError(f"with loss, batch is a pair of inputs and target, got {type(batch).__name__}.")
        return _scalar(loss(_called(module, batch[0]), batch[1]), "loss")
    outputs = [leaf for leaf in tree_leaves(_called(module, batch)) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not outputs:
        raise ValueError("no output needs a gradient, so that there is no backward.")
    return torch.stack([output.float().mean() for output in outputs]).sum()


def _called(module: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, (tuple, list)) else module(inputs)


def _scalar(value: Any, source: str) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{source} returned {got}; a scalar that needs a gradient is wanted.")
    return value

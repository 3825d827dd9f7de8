"""The loss of one batch: of a LightningModule's own step, or of a plain module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

__all__ = ["loss_of"]


def loss_of(module: nn.Module, batch: Any, loss: Callable[[Any, Any], Tensor] | None) -> Tensor:
    """The scalar to call ``backward`` on.

    >>> loss_of(nn.Linear(2, 1), torch.zeros(4, 2), None).shape
    torch.Size([])
    """
    step = getattr(module, "training_step", None)
    if step is not None:
        if loss is not None:
            raise ValueError("loss belongs to a plain module; a LightningModule has its own in training_step.")
        if not getattr(module, "automatic_optimization", True):
            raise ValueError(
                "The module optimizes manually, so that its steps cannot be told apart. Estimate its parts."
            )
        takes_index = is_param_in_hook_signature(step, "batch_idx", min_args=2)
        return _scalar(_of_lightning(step(batch, 0) if takes_index else step(batch)), "training_step")
    if loss is None:
        outputs = [leaf for leaf in tree_leaves(_call(module, batch)) if _can_train(leaf)]
        if not outputs:
            raise ValueError("No output of the module needs a gradient, so that there is no backward pass to estimate.")
        return torch.stack([output.float().mean() for output in outputs]).sum()
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        got = "a tensor" if isinstance(batch, Tensor) else type(batch).__name__
        raise ValueError(f"With loss, batch is a pair of inputs and target, got {got}.")
    return _scalar(loss(_call(module, batch[0]), batch[1]), "loss")


def _call(module: nn.Module, inputs: Any) -> Any:
    named = isinstance(inputs, Mapping)
    keywords = dict(inputs) if named else {}
    arguments = () if named else tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    _check_arguments(module, arguments, keywords)
    return module(*arguments, **keywords)


def _check_arguments(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):  # one that is not written in Python
        return
    try:
        signature.bind(*arguments, **keywords)
    except TypeError as error:
        given = f"the keys {', '.join(map(repr, keywords))}" if keywords else f"{len(arguments)} arguments"
        called = f"{type(module).__name__}.forward({', '.join(signature.parameters)})"
        raise ValueError(
            f"{called} cannot be called with {given} of the batch: {error}. If the batch is a pair of inputs and "
            "target, give loss too, such as loss=torch.nn.functional.cross_entropy; if not, pass what forward takes."
        ) from error


def _of_lightning(output: Any) -> Any:
    return output.get("loss") if isinstance(output, Mapping) else output


def _scalar(value: Any, source: str) -> Tensor:
    if not _can_train(value) or value.numel() != 1:
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{source} returned {got}; a scalar that needs a gradient is wanted.")
    scalar: Tensor = value
    return scalar


def _can_train(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad

"""The optimizers of an estimated step: by name, by a function, or the module's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from lightning_speedkit.errors import did_you_mean

__all__ = ["make_optimizers"]

_CLASSES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    name.lower(): cls
    for name, cls in inspect.getmembers(torch.optim, inspect.isclass)
    if issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer and name != "LBFGS"
}
_NAMES = ("auto", "none", "sgd-momentum", *_CLASSES)


def make_optimizers(
    module: nn.Module, optimizer: str | Callable[[list[nn.Parameter]], torch.optim.Optimizer]
) -> list[torch.optim.Optimizer]:
    """The optimizers of the module's parameters.

    Raises:
        ValueError: If a name is unknown, or ``configure_optimizers`` needs a trainer.
        TypeError: If it is neither a name nor a function, or a function returns something else.

    >>> make_optimizers(nn.Linear(2, 2), "adamw")[0].__class__.__name__
    'AdamW'
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not isinstance(optimizer, str):
        if not callable(optimizer):
            raise TypeError(
                f"optimizer is a name such as 'adamw', or a function from parameters to an optimizer; "
                f"got {type(optimizer).__name__}. For no optimizer give 'none'."
            )
        made = optimizer(parameters)
        if not isinstance(made, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer returned {type(made).__name__}; a function from parameters to an optimizer is due."
            )
        return [made]
    name = optimizer.lower()
    if name not in _NAMES:
        hint = did_you_mean(name, _NAMES, most=1)
        raise ValueError(f"optimizer={optimizer!r} is unknown.{hint} Known: {', '.join(_NAMES)}; or give a function.")
    if name == "none" or not parameters:
        return []
    if name == "auto":
        configure = getattr(module, "configure_optimizers", None)
        return [torch.optim.AdamW(parameters)] if configure is None else _configured(configure)
    # On CUDA torch works on lists of tensors by default, but not for fakes, which are of another class.
    on_cuda: dict[str, Any] = {"foreach": True} if parameters[0].is_cuda and "foreach" in _arguments(name) else {}
    if name == "sgd-momentum":
        return [torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, **on_cuda)]
    return [_CLASSES[name](parameters, lr=1e-3, **on_cuda)]


def _arguments(name: str) -> Mapping[str, Any]:
    return inspect.signature(_CLASSES.get(name, torch.optim.SGD)).parameters


def _configured(configure: Callable[[], Any]) -> list[torch.optim.Optimizer]:
    try:
        found = configure()
    except RuntimeError as error:
        raise ValueError(
            f"configure_optimizers cannot run without a trainer: {error} Name an optimizer, for example 'adamw'."
        ) from error
    return list(_optimizers_in(found))


def _optimizers_in(found: Any) -> list[torch.optim.Optimizer]:
    """Lightning's forms: one, several, with schedules beside them, or dicts."""
    if isinstance(found, torch.optim.Optimizer):
        return [found]
    if isinstance(found, Mapping):
        return _optimizers_in(found.get("optimizer"))
    if isinstance(found, (list, tuple)):
        return [one for item in found for one in _optimizers_in(item)]
    return []

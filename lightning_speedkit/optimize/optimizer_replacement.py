"""Another optimizer over the parameters that an optimizer trains already.

What it does: keeps which parameters are trained and, where they mean the same, their rates and decays. When it helps:
to put an optimizer in the place of one that somebody else wrote. It costs nothing: the old one has no state yet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import SGD, Adafactor, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam

from lightning_speedkit.optimize.optimizer import build_from_settings, named_optimizer
from lightning_speedkit.optimize.optimizer_groups import ParameterSetting, parameter_settings

__all__ = ["replaced_optimizer"]

# the optimizers whose learning rates are of one kind
_SCALES: Mapping[str, tuple[type[Optimizer], ...]] = {
    "adam": (Adam, AdamW, NAdam, RAdam, Adamax),
    "sgd": (SGD,),
    "adafactor": (Adafactor,),
}


def replaced_optimizer(
    module: nn.Module,
    own: Optimizer,
    name: str,
    *,
    lr: float | None = None,
    weight_decay: float | None = None,
    layer_decay: float = 1.0,
    layers: Sequence[str] | None = None,
    decay_all: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Optimizer:
    """The optimizer of that name over the parameters that another optimizer of the module trains.

    Args:
        module: The module.
        own: The optimizer that is replaced.
        name: As in :func:`~lightning_speedkit.optimize.optimizer.build_optimizer`, as is all that follows.
        lr: ``None`` keeps, for each parameter, the rate that ``own`` has for it.
        weight_decay: ``None`` keeps that of ``own``, if its rates are of the same kind.

    Raises:
        MisconfigurationException: ``lr`` is missing, and a rate for ``own`` is none for the new optimizer; or ``own``
            trains something that is no parameter of the module.

    >>> import torch
    >>> net = nn.Linear(2, 1)
    >>> optimizer = replaced_optimizer(net, torch.optim.AdamW([net.weight], lr=0.02), "adam")
    >>> optimizer.param_groups[0]["lr"], len(optimizer.param_groups[0]["params"])
    (0.02, 1)
    """
    named = named_optimizer(name)
    groups = {p: group for group in own.param_groups for p in group["params"]}
    strange = len(groups.keys() - set(module.parameters()))
    if strange:
        raise MisconfigurationException(
            f"{type(own).__name__} trains {strange} tensors that are no parameters of {type(module).__name__}, so they "
            "cannot be given to another optimizer."
        )
    alike = isinstance(own, _SCALES[named.scale])
    if lr is None and not alike:
        raise MisconfigurationException(
            f"The learning rate of {type(own).__name__} is none for {name!r}. Pass lr: "
            f"OptimizerChoice({name!r}, lr=...)."
        )

    def setting(found: ParameterSetting) -> ParameterSetting:
        group = groups[found.parameter]
        decay = group.get("weight_decay", named.weight_decay) if alike else named.weight_decay
        return dataclasses.replace(
            found,
            lr=found.lr * (float(group["lr"]) if lr is None else 1.0),
            weight_decay=found.weight_decay * (decay if weight_decay is None else 1.0),
        )

    settings = parameter_settings(
        module,
        1.0 if lr is None else lr,
        1.0 if weight_decay is None else weight_decay,
        layer_decay=layer_decay,
        layers=layers,
        decay_all=decay_all,
    )
    return build_from_settings(name, module, [setting(s) for s in settings if s.parameter in groups], options)

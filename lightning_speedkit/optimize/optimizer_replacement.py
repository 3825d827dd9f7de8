"""Another optimizer over the parameters that an optimizer trains already.

What it does: keeps which parameters are trained and, where they mean the same, their rates and decays. When it helps:
to put an optimizer in the place of one that somebody else wrote. It costs nothing: the old one has no state yet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.optim import SGD, Adafactor, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam

from lightning_speedkit.optimize.lr_range_rates import peak_rate, peak_rates, write_value
from lightning_speedkit.optimize.optimizer import NamedOptimizer, named_optimizer
from lightning_speedkit.optimize.optimizer_groups import ParameterSetting

__all__ = ["inherited_settings", "without_schedules"]

# the optimizers whose learning rates are of one kind
_SCALES: Mapping[str, tuple[type[Optimizer], ...]] = {
    "adam": (Adam, AdamW, NAdam, RAdam, Adamax),
    "sgd": (SGD,),
    "adafactor": (Adafactor,),
}
# what schedulers of torch write into a group
_OF_SCHEDULES = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")


def without_schedules(optimizer: Optimizer, schedulers: Iterable[Any]) -> Optimizer:
    """The optimizer with the rates that it had before it was given these schedules, which set them at once.

    ``CyclicLR`` and ``OneCycleLR`` leave no rate but their own: there the highest is taken. Where they cycle the
    momentum as well, each group gets the momentum that the optimizer was made with; one of its own is not to be found
    any more.

    >>> import torch
    >>> optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.8)
    >>> schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=10)
    >>> [round(optimizer.param_groups[0][name], 3) for name in ("lr", "momentum")]
    [0.02, 0.95]
    >>> [without_schedules(optimizer, [schedule]).param_groups[0][name] for name in ("lr", "momentum")]
    [0.5, 0.8]
    """
    defaults = optimizer.defaults
    for group, rate in zip(optimizer.param_groups, peak_rates(optimizer, schedulers), strict=True):
        write_value(group, "lr", rate)
        if "max_momentum" in group and "betas" in defaults:
            group["betas"] = (defaults["betas"][0], *group["betas"][1:])
        elif "max_momentum" in group:
            group["momentum"] = defaults["momentum"]
        for name in _OF_SCHEDULES:
            group.pop(name, None)
    return optimizer


def inherited_settings(
    settings: Iterable[ParameterSetting],
    module: nn.Module,
    own: Optimizer,
    name: str,
    *,
    lr: bool = True,
    weight_decay: bool = True,
    options: Mapping[str, Any] | None = None,
) -> list[ParameterSetting]:
    """The settings of the parameters that ``own`` trains, with the rates and decays that they have there.

    Args:
        settings: Of all parameters of the module. Where a rate or a decay is inherited, the one here is the factor
            that it is multiplied with.
        module: The module.
        own: The optimizer that is replaced.
        name: The one in its place, as in :func:`~lightning_speedkit.optimize.optimizer.build_optimizer`.
        lr: Inherit, for each parameter, the highest rate that ``own`` and its schedule have for it.
        weight_decay: Inherit that of ``own``, if its rates are of the same kind. A decay that is added to the gradient
            is another than one that shrinks the weights: between the two kinds only a 0 is inherited; for others the
            new optimizer's default is taken, and a warning says so.
        options: Of the new optimizer, which may change the kind of its decay.

    Raises:
        MisconfigurationException: A rate is to be inherited, and one for ``own`` is none for the new optimizer; or
            ``own`` trains something that is no parameter of the module.

    >>> import torch
    >>> net = nn.Linear(2, 1)
    >>> own = torch.optim.Adam([net.weight], lr=0.02, weight_decay=0.0)
    >>> settings = [ParameterSetting(name, p, 0.5, 1.0) for name, p in net.named_parameters()]
    >>> [(s.name, s.lr, s.weight_decay) for s in inherited_settings(settings, net, own, "adamw")]
    [('weight', 0.01, 0.0)]
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
    if lr and not alike:
        raise MisconfigurationException(
            f"The learning rate of {type(own).__name__} is none for {name!r}. Pass lr: "
            f"OptimizerChoice({name!r}, lr=...)."
        )

    decoupled = bool((options or {}).get("decoupled_weight_decay", named.decoupled))
    decays = {p: _kept_decay(own, group, decoupled) if alike else None for p, group in groups.items()}
    lost = {float(groups[p]["weight_decay"]) for p, d in decays.items() if d is None and groups[p].get("weight_decay")}
    if weight_decay and alike and lost:
        _warn_of_decay(own, name, named, decoupled, lost)

    def inherited(found: ParameterSetting) -> ParameterSetting:
        decay = decays[found.parameter]
        return dataclasses.replace(
            found,
            lr=found.lr * (peak_rate(groups[found.parameter]) if lr else 1.0),
            weight_decay=found.weight_decay
            * ((named.weight_decay if decay is None else decay) if weight_decay else 1.0),
        )

    return [inherited(found) for found in settings if found.parameter in groups]


def _kept_decay(own: Optimizer, group: Mapping[str, Any], decoupled: bool) -> float | None:
    """The weight decay of a group of ``own`` for an optimizer that decouples it or not; ``None``: it means another."""
    decay = group.get("weight_decay")
    of_own = group.get("decoupled_weight_decay", isinstance(own, (AdamW, Adafactor)))
    return None if decay is None or (decay and bool(of_own) != decoupled) else float(decay)


def _warn_of_decay(own: Optimizer, name: str, named: NamedOptimizer, decoupled: bool, lost: Iterable[float]) -> None:
    kinds = ("added to the gradient", "taken from the weights beside the update")
    rank_zero_warn(
        f"The weight decay of {type(own).__name__} ({', '.join(f'{decay:g}' for decay in sorted(lost))}) is "
        f"{kinds[not decoupled]}, and that of {name!r} is {kinds[decoupled]}: one value does not mean the same in "
        f"both, so {name!r} takes its own default, {named.weight_decay:g}. Pass weight_decay to choose it."
    )

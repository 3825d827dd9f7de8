"""Optimizers by name, with groups, weight decay and the fastest implementation chosen as they should be.

What it does: ``build_optimizer("adamw", module, lr=1e-3)`` takes the trainable parameters of a module, each once, puts
no weight decay on biases and norms, and uses the fused implementation where the parameters allow it. When it helps:
where the optimizer is a noticeable part of a step; ``python -m benchmarks.optimizer_step`` measures it. What it costs:
a fused step differs from the default one in the last bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_speedkit.optimize.misplaced_arguments import names_options
from lightning_speedkit.optimize.muon import MuonWithAdamW, hidden_matrices
from lightning_speedkit.optimize.offloaded_adamw import OFFLOADED, check_devices, class_of_torchao
from lightning_speedkit.optimize.optimizer_groups import ParameterSetting, parameter_groups, parameter_settings
from lightning_speedkit.optimize.optimizer_options import checked_name, checked_options, defaults_of
from lightning_speedkit.optimize.schedule_free import ScheduleFreeAdamW

__all__ = [
    "OPTIMIZERS",
    "NamedOptimizer",
    "build_from_settings",
    "build_optimizer",
    "check_optimizer_options",
    "named_optimizer",
    "optimizer_option_names",
]

_FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedOptimizer:
    """What a name stands for.

    ``weight_decay`` is the default, ``scale`` the kind of learning rate that it takes, and ``decoupled`` says whether
    the decay shrinks the weights beside the update, or is added to the gradient.
    """

    summary: str
    cls: type[Optimizer] | None  # None: a library that is looked for when it is used
    scale: str
    weight_decay: float = 0.0
    decoupled: bool = True
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fuses: bool = False


OPTIMIZERS: Mapping[str, NamedOptimizer] = {
    "adamw": NamedOptimizer(
        summary="AdamW, fused.", cls=torch.optim.AdamW, scale="adam", weight_decay=0.01, fuses=True
    ),
    "adam": NamedOptimizer(
        summary="Adam, fused; its weight decay is added to the gradient.",
        cls=torch.optim.Adam,
        scale="adam",
        decoupled=False,
        fuses=True,
    ),
    "sgd-momentum": NamedOptimizer(
        summary="SGD with a momentum of 0.9, fused.",
        cls=torch.optim.SGD,
        scale="sgd",
        decoupled=False,
        defaults={"momentum": 0.9},
        fuses=True,
    ),
    "adafactor": NamedOptimizer(
        summary="Adafactor, whose states are a row and a column per matrix.",
        cls=torch.optim.Adafactor,
        scale="adafactor",
    ),
    "muon": NamedOptimizer(
        summary="Muon for the hidden matrices, AdamW for the rest.",
        cls=MuonWithAdamW,
        scale="adam",
        weight_decay=0.1,
        fuses=True,
    ),
    "adamw-8bit": NamedOptimizer(
        summary="AdamW with states of 8 bits, by torchao.", cls=None, scale="adam", weight_decay=0.01
    ),
    OFFLOADED: NamedOptimizer(
        summary="AdamW with its states and its step on the host, by torchao.",
        cls=None,
        scale="adam",
        weight_decay=0.01,
    ),
    "schedule-free": NamedOptimizer(
        summary="AdamW with an average of the weights in place of a schedule.", cls=ScheduleFreeAdamW, scale="adam"
    ),
}


def named_optimizer(name: str) -> NamedOptimizer:
    """What a name stands for.

    Raises:
        TypeError: It is no text.
        ValueError: There is no such name; the message has the nearest.

    >>> named_optimizer("muon").summary
    'Muon for the hidden matrices, AdamW for the rest.'
    """
    return OPTIMIZERS[checked_name("optimizer", name, OPTIMIZERS)]


def optimizer_option_names() -> set[str]:
    """What may stand in the options of one optimizer or another.

    >>> sorted(optimizer_option_names() & {"betas", "momentum", "lr"})
    ['betas', 'momentum']
    """
    classes = {named.cls for named in OPTIMIZERS.values()} - {None}
    return {name for cls in classes if cls for name in defaults_of(cls)} - {"params", "lr", "weight_decay"}


@names_options("build_optimizer(..., options={'NAME': ...})", optimizer_option_names)
def build_optimizer(
    name: str,
    module: nn.Module,
    lr: float,
    weight_decay: float | None = None,
    *,
    layer_decay: float = 1.0,
    layers: Sequence[str] | None = None,
    decay_all: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Optimizer:
    """An optimizer over the trainable parameters of a module.

    Args:
        name: ``"adamw"``, ``"adam"``, ``"sgd-momentum"``, ``"adafactor"``, ``"muon"``, ``"adamw-8bit"`` and
            ``"adamw-cpu-offload"`` (they need torchao, the second one also a GPU) or ``"schedule-free"`` (needs its
            switches: see :class:`~lightning_speedkit.optimize.schedule_free_switch.ScheduleFreeSwitch`).
        module: Any module. What it shares is taken once, what is frozen is left out.
        lr: The learning rate, of the last layer if ``layer_decay`` is below 1.
        weight_decay: Of weights; ``None`` takes the optimizer's own default. Biases and norms get none.
        layer_decay: Each layer's rate is that of the next layer towards the output times this.
        layers: The layers from input to output, as prefixes of parameter names, where they cannot be told.
        decay_all: Decay biases and norms too.
        options: Further arguments of the optimizer, for example ``{"betas": [0.9, 0.95]}``,
            ``{"nesterov": True}`` or ``{"fused": False}``.

    Raises:
        ValueError: A name, an option or a number is not allowed, or there is nothing to train.
        TypeError: An argument or an option is of the wrong kind.
        MissingExtraError: torchao is not installed.

    >>> net = nn.Sequential(nn.Linear(2, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    >>> optimizer = build_optimizer("sgd-momentum", net, lr=0.1, weight_decay=5e-4, options={"nesterov": True})
    >>> [(group["name"], len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups]
    [('decay', 2, 0.0005), ('no_decay', 4, 0.0)]
    """
    decay = named_optimizer(name).weight_decay if weight_decay is None else weight_decay
    settings = parameter_settings(module, lr, decay, layer_decay=layer_decay, layers=layers, decay_all=decay_all)
    return build_from_settings(name, module, settings, options)


def build_from_settings(
    name: str, module: nn.Module, settings: Sequence[ParameterSetting], options: Mapping[str, Any] | None = None
) -> Optimizer:
    """The optimizer of that name over settings that :func:`parameter_settings` gave, or that were made of them.

    >>> settings = parameter_settings(net := nn.Linear(2, 1), lr=0.1)
    >>> type(build_from_settings("adam", net, settings)).__name__
    'Adam'
    """
    named = named_optimizer(name)
    if not settings:
        raise ValueError(f"There is nothing to train in {type(module).__name__}: no parameter is left for {name!r}.")
    if name == OFFLOADED:
        check_devices(s.parameter for s in settings)
    cls = named.cls or class_of_torchao(name)
    given = _checked(name, cls, options)
    chosen = {**named.defaults, **given}
    if named.fuses and not {"fused", "foreach", "differentiable", "capturable"} & chosen.keys():
        chosen["fused"] = _can_fuse(s.parameter for s in settings)
    groups = _muon_groups(module, settings) if cls is MuonWithAdamW else parameter_groups(settings)
    lr = max(s.lr for s in settings)  # unused: each group has its own
    try:
        return cls(groups, lr=lr, **chosen)  # type: ignore[call-arg]
    except (RuntimeError, TypeError, ValueError) as error:
        if not given:
            raise
        raise ValueError(f"The optimizer {name!r} refuses the options {given}: {error}") from error


def check_optimizer_options(name: str, options: Mapping[str, Any] | None) -> None:
    """Raise as :func:`build_optimizer` would for these options, as far as can be told without parameters.

    >>> check_optimizer_options("adam", {"betas": [0.9, 0.95]})
    """
    cls = named_optimizer(name).cls
    if cls is not None:  # else its library is looked for only when it is used
        _checked(name, cls, options)


def _checked(name: str, cls: type[Optimizer], options: Mapping[str, Any] | None) -> dict[str, Any]:
    defaults = defaults_of(cls)
    if name == OFFLOADED:  # a class around another one, whose options it hands on
        defaults = {**defaults_of(torch.optim.AdamW), **defaults_of(cls, ["minimal_size"])}
    for argument in ("params", "lr", "weight_decay"):
        defaults.pop(argument)
        if isinstance(options, Mapping) and argument in options:
            raise ValueError(f"{argument} is no option of {name!r} but an argument of its own: give it beside options.")
    chosen = checked_options(name, options, defaults)
    for position, beta in enumerate(chosen.get("betas", ())):
        if not 0 <= beta < 1:
            raise ValueError(f"betas[{position}]={beta!r} must be 0 or more, and below 1.")
    return chosen


def _muon_groups(module: nn.Module, settings: Sequence[ParameterSetting]) -> list[dict[str, Any]]:
    hidden = set(hidden_matrices(module))
    matrices = [s for s in settings if s.name in hidden]
    if not matrices:
        raise ValueError(
            f"{type(module).__name__} has nothing for Muon, which is for weight matrices of hidden layers that are "
            "trained (embeddings and the last layer are left to AdamW). Use 'adamw'."
        )
    of_muon = [{**group, "muon": True} for group in parameter_groups(matrices)]
    others = [{**group, "muon": False} for group in parameter_groups([s for s in settings if s.name not in hidden])]
    groups = of_muon + others
    if len(groups) > 1:
        for group in groups:
            group["name"] = f"{'muon' if group['muon'] else 'adamw'}_{group.get('name', 'all')}"
    return groups


def _can_fuse(parameters: Iterable[nn.Parameter]) -> bool | None:
    """``None``, which leaves the choice to torch, where the fused kernels would refuse a parameter."""
    fits = all(p.is_floating_point() and p.device.type in _FUSED_DEVICES for p in parameters)
    return True if fits else None

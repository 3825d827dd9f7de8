"""Lighter layers in a network that is there: depthwise-separable, grouped and low-rank ones where they pay.

What it does: in a copy of the model, convolutions and linear layers are replaced by pairs of cheaper ones that start as
near to the old weights as their size allows. A layer is replaced only if that saves multiply-adds as asked and, timed
on this device, seconds. The interface of the model stays: shapes, dtypes, device, modes, frozen layers.

When it helps: a network that is trained already, or whose architecture is given, and that has to be cheaper. What it
costs: accuracy, which fine-tuning gives back in part; distillation from the old model may help.

Sources: see ``depthwise.py`` and ``low_rank.py``; measured by ``benchmarks/lighten.py``.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_speedkit.architecture.lighten_choice import KINDS, Choice, choices_for
from lightning_speedkit.architecture.lighten_layers import copy_model, find_layers, lighter_layer, replace_layers_
from lightning_speedkit.architecture.lighten_measure import (
    Use,
    call_model,
    count_flops,
    device_of,
    evaluating,
    float_outputs,
    paired_seconds,
    record_uses,
)
from lightning_speedkit.architecture.lighten_report import LightenReport, LighterLayer, read_plan
from lightning_speedkit.measure.own_random_numbers import own_random_numbers

__all__ = ["apply_plan", "lighten"]

_LEAST_SHARE = 0.001  # of the multiply-adds of all layers: below it, a layer is not worth its accuracy
_SECONDS_PER_CHOICE, _SECONDS_IN_TOTAL = 0.05, 0.5


def lighten(
    model: nn.Module,
    example: Any,
    kinds: Sequence[str] = KINDS,
    *,
    ratio: float = 0.5,
    rank: int | None = None,
    energy: float | None = None,
    min_saving: float | None = 0.1,
    skip: Sequence[str] = (),
) -> tuple[nn.Module, LightenReport]:
    """A lighter copy of ``model``, and what was replaced in it. ``model`` is not changed.

    Of the kinds that fit a layer and pay, the one that is nearest to its weights is taken.

    Args:
        model: Any module; trained, or the start is of no use. On any device, in either mode.
        example: What it is called with, as large as in use: a tensor, a tuple of arguments, a dict of keyword
            arguments, or a function of the model, such as ``lambda module: module.training_step(batch, 0)``.
        kinds: Of ``"depthwise"`` and ``"grouped"``, for convolutions with kernels larger than 1, and ``"low-rank"``,
            for linear layers and any convolution.
        ratio: The most multiply-adds of a layer that its replacement may take, above 0 and below 1.
        rank: The same rank for every layer; ``rank=1`` with ``kinds=["depthwise"]`` is MobileNet's block. If not given,
            the largest that ``ratio`` allows.
        energy: Instead of ``rank``: the least rank that keeps this share of the squared singular values, above 0 and at
            most 1. A layer that needs more than ``ratio`` stays.
        min_saving: The least share of its seconds that a layer has to save, timed in eval mode on this device, below 1.
            ``None`` times nothing, so that the choice depends on the weights alone.
        skip: Names of layers, or of modules with layers in them, that stay; ``*`` and ``?`` are wildcards.

    Raises:
        ValueError: An argument is out of range, the model cannot be copied, or it does not run with the example, before
            or after.
        TypeError: ``model`` is no module, or is wrapped or compiled.

    Warns:
        UserWarning: Nothing was replaced; the report says why.

    >>> net = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(2048, 10))
    >>> light, report = lighten(net, torch.zeros(4, 16, 8, 8), ["depthwise"], rank=1, min_saving=None)
    >>> light[0].spatial, light[0].pointwise
    (Conv2d(16, 16, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), groups=16, bias=False), Conv2d(16, 32, kernel_size=(1, 1), stride=(1, 1)))
    >>> report.parameters_before, report.parameters_after, report.left
    (25130, 21178, {'3': 'no kind asked for fits it in 0.5 of its multiply-adds'})
    """  # noqa: E501
    _check(kinds, ratio, rank, energy, min_saving)
    plain = copy_model(model)
    layers, left = find_layers(plain, skip)
    try:
        before = float_outputs(plain, example)
    except Exception as error:  # user code may raise anything
        raise ValueError(f"The model does not run with the example ({type(error).__name__}: {error}).") from error
    uses = record_uses(plain, layers, example)
    total = sum(use.multiply_adds for use in uses.values())
    timer = _Timer(min_saving, device_of(plain))
    chosen: dict[str, tuple[Choice, tuple[float, float] | None]] = {}
    for name, layer in layers.items():
        if name not in uses:
            left[name] = "the example does not reach it"
        elif uses[name].multiply_adds < _LEAST_SHARE * total:
            left[name] = f"it has {uses[name].multiply_adds / total:.3%} of the multiply-adds"
        else:
            tried = choices_for(layer, kinds, ratio, rank, energy)
            picked = next((choice for choice in tried if timer.pays(layer, choice, uses[name])), None)
            if picked is not None:
                chosen[name] = (picked, timer.seconds(layer, picked, uses[name]))
            elif tried:
                left[name] = f"no replacement saves {min_saving:g} of its time here"
            else:
                left[name] = f"no kind asked for fits it in {ratio:g} of its multiply-adds"
    light = _replaced(copy_model(model), {name: (c.groups, c.rank) for name, (c, _) in chosen.items()}, True)
    try:
        after = float_outputs(light, example)
    except Exception as error:
        raise ValueError(
            f"The lighter model does not run ({type(error).__name__}: {error}). Its code reads more of a layer than "
            f"its output; name that layer in skip. Replaced: {', '.join(chosen)}."
        ) from error
    if [(t.shape, t.dtype) for t in before] != [(t.shape, t.dtype) for t in after]:
        raise ValueError(
            f"The lighter model answers in other shapes or dtypes. Replaced: {', '.join(chosen)}; use skip."
        )
    if not chosen:
        reasons = "; ".join(f"{name}: {why}" for name, why in list(left.items())[:3]) or "it has no such layers"
        warnings.warn(f"lighten() replaced nothing ({reasons}).", UserWarning, stacklevel=2)
    seconds = _total_seconds(plain, light, example) if min_saving is not None and chosen else (None, None)
    return light, LightenReport(
        layers=tuple(_described(name, layers[name], uses[name], *chosen[name]) for name in chosen),
        left=left,
        parameters_before=_parameters(model),
        parameters_after=_parameters(light),
        flops_before=count_flops(plain, example),
        flops_after=count_flops(light, example),
        output_error=_relative_error(before, after),
        seconds_before=seconds[0],
        seconds_after=seconds[1],
    )


def apply_plan(model: nn.Module, plan: Mapping[str, Any], *, warm_start: bool = True) -> nn.Module:
    """A copy of ``model`` in the structure of a plan, which a report of :func:`lighten` holds. Nothing is measured.

    The structure depends on the plan alone, so a checkpoint of a lighter model loads into it.

    Args:
        model: The model that was lightened, newly built or not.
        plan: ``report.plan``, or what came back from JSON or YAML.
        warm_start: Start as near to the weights of ``model`` as possible; with ``False`` the new layers get torch's
            random start, which is quick, for weights that will be loaded or trained from the beginning.

    Raises:
        ValueError: The plan does not fit the model, or the model cannot be copied.
        TypeError: ``plan`` is no plan, ``model`` no module, or is wrapped or compiled.

    >>> net = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    >>> light, report = lighten(net, torch.zeros(2, 64), min_saving=None)
    >>> again = apply_plan(net, report.plan, warm_start=False)
    >>> again.load_state_dict(light.state_dict())
    <All keys matched successfully>
    """
    copied = copy_model(model)
    layers, left = find_layers(copied)
    return _replaced(copied, read_plan(plan, layers, left), warm_start)


def _replaced(model: nn.Module, wanted: Mapping[str, tuple[int, int]], warm_start: bool) -> nn.Module:
    made = {
        name: lighter_layer(model.get_submodule(name), groups, rank, warm_start=warm_start)
        for name, (groups, rank) in wanted.items()
    }
    return replace_layers_(model, made)


class _Timer:
    """Seconds of a layer and of its replacement in turns; the same work is timed once."""

    def __init__(self, min_saving: float | None, device: torch.device) -> None:
        self._min_saving, self._device = min_saving, device
        self._known: dict[Any, tuple[float, float]] = {}

    def pays(self, layer: nn.Module, choice: Choice, use: Use) -> bool:
        """Whether the saving is enough, or nothing is to be timed."""
        told = self.seconds(layer, choice, use)
        return told is None or self._min_saving is None or told[1] <= (1 - self._min_saving) * told[0]

    def seconds(self, layer: nn.Module, choice: Choice, use: Use) -> tuple[float, float] | None:
        """Of one call of each, or ``None`` if nothing is to be timed."""
        if self._min_saving is None:
            return None
        key = (layer.extra_repr(), type(layer), use.shape, use.dtype, use.channels_last, choice.groups, choice.rank)
        if key not in self._known:
            given = use.input(self._device)
            with own_random_numbers(self._device):
                lighter = lighter_layer(layer, choice.groups, choice.rank, warm_start=False)
            with torch.no_grad():
                self._known[key] = paired_seconds(
                    partial(layer, given), partial(lighter, given), self._device, _SECONDS_PER_CHOICE
                )
        return self._known[key]


def _total_seconds(plain: nn.Module, light: nn.Module, example: Any) -> tuple[float, float]:
    with evaluating(plain), evaluating(light):
        return paired_seconds(
            partial(call_model, plain, example),
            partial(call_model, light, example),
            device_of(plain),
            _SECONDS_IN_TOTAL,
        )


def _described(
    name: str, layer: nn.Module, use: Use, choice: Choice, seconds: tuple[float, float] | None
) -> LighterLayer:
    weight = layer.get_parameter("weight")
    bias = _parameters(layer) - weight.numel()
    return LighterLayer(
        name=name,
        layer=f"{type(layer).__name__}({layer.extra_repr()})",
        kind=choice.kind,
        groups=choice.groups,
        rank=choice.rank,
        shape=tuple(weight.shape),
        error=choice.error,
        parameters_before=weight.numel() + bias,
        parameters_after=choice.rank * (weight[0].numel() + choice.groups * weight.shape[0]) + bias,
        multiply_adds_before=use.multiply_adds,
        multiply_adds_after=round(use.multiply_adds * choice.share),
        seconds_before=seconds[0] if seconds else None,
        seconds_after=seconds[1] if seconds else None,
    )


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _relative_error(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> float:
    lost = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(before, after, strict=True))
    size = sum(float(a.double().square().sum()) for a in before)
    return float((lost / size) ** 0.5) if size else float(lost > 0)


def _check(
    kinds: Sequence[str], ratio: float, rank: int | None, energy: float | None, min_saving: float | None
) -> None:
    known = ", ".join(map(repr, KINDS))
    if isinstance(kinds, str):
        raise TypeError(f"kinds={kinds!r} is a list of kinds: kinds=[{kinds!r}].")
    if wrong := [kind for kind in kinds if kind not in KINDS]:
        raise ValueError(f"kinds: {wrong[0]!r} is none of {known}.")
    if not kinds:
        raise ValueError(f"kinds is empty; use some of {known}.")
    for name, value, most in (("ratio", ratio, None), ("energy", energy, 1.0), ("min_saving", min_saving, None)):
        if value is None and name != "ratio":
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name} is a number, got {value!r}.")
        least = value >= 0 if name == "min_saving" else value > 0
        if not (least and (value < 1 or value == most)):
            bounds = {"ratio": "above 0 and below 1", "energy": "above 0 and at most 1"}.get(name, "0 or more, below 1")
            raise ValueError(f"{name}={value!r} must be {bounds}.")
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int)):
        raise TypeError(f"rank is a whole number, got {rank!r}.")
    if rank is not None and rank < 1:
        raise ValueError(f"rank={rank} must be 1 or more.")
    if rank is not None and energy is not None:
        raise ValueError("rank and energy both say how much of a layer is kept; give one of them.")

"""Chooses which layers of a float model become int8, and makes them so.

A network is quantized in its largest parts that torch.fx can trace: those run in int8 from end to end, with
BatchNorm and ReLU fused, their ranges fixed by calibration. Linear and recurrent layers outside such parts measure
the range of their input at every call. What was done is written down as a recipe, which repeats it on a fresh model.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_speedkit.compress.calls import Call, inside_metrics, used_modules
from lightning_speedkit.compress.float_copy import copy_module, replace_module
from lightning_speedkit.compress.module_names import matches
from lightning_speedkit.compress.parts import (
    PartSearch,
    TracedPart,
    calibrated_parts,
    install_part,
    part_from_recipe,
)
from lightning_speedkit.compress.torch_ao import (
    CONVOLUTIONS,
    RECURRENT_LAYERS,
    dynamic_layer,
    dynamic_refusal,
    is_quantized,
    quantized_engine,
    static_refusal,
)
from lightning_speedkit.compress.weight_shapes import shape_difference, weight_shapes
from lightning_speedkit.errors import QuantizationError

__all__ = ["Int8Model", "containers", "follow_recipe", "make_int8", "static_method", "weighted_layers"]


@dataclass(slots=True)
class Int8Model:
    """An int8 copy, how it was made, and what stayed in float (name -> why)."""

    module: nn.Module
    recipe: dict[str, Any]
    quantized: tuple[str, ...]
    skipped: dict[str, str]


def weighted_layers(root: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold a weight of two or more dimensions themselves: what quantization could make smaller."""
    metrics = inside_metrics(root)
    return {
        name: module
        for name, module in root.named_modules()
        if name not in metrics and any(weight.ndim >= 2 for weight in module.parameters(recurse=False))
    }


def containers(root: nn.Module) -> set[str]:
    """Those of :func:`weighted_layers` that hold a raw parameter beside layers of their own, and so are no layers.

    Such as a transformer with an ``nn.Parameter`` for its positions. ``nn.MultiheadAttention`` is a layer all the same.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(2, 2))
    >>> net.positions = nn.Parameter(torch.zeros(5, 2))
    >>> list(weighted_layers(net)), containers(net)
    (['', '0'], {''})
    """
    layers = weighted_layers(root)
    return {
        name
        for name, module in layers.items()
        if not isinstance(module, nn.MultiheadAttention)
        and any(other != name and (not name or other.startswith(f"{name}.")) for other in layers)
    }


def static_method(floating: nn.Module) -> str:
    """How :func:`make_int8` makes as much static as it is good for: beside convolutions Linear layers may be dynamic.

    >>> static_method(nn.Linear(2, 1)), static_method(nn.LSTM(2, 1))
    ('static', 'static+dynamic')
    """
    mixed = any(type(layer) in (*CONVOLUTIONS, *RECURRENT_LAYERS) for layer in floating.modules())
    return "static+dynamic" if mixed else "static"


def make_int8(floating: nn.Module, calls: Sequence[Call], *, method: str, skip: Sequence[str] = ()) -> Int8Model:
    """An int8 copy of ``floating`` (from :func:`float_copy`), calibrated on ``calls``.

    ``method`` is ``"static"``, ``"dynamic"`` or ``"static+dynamic"``: parts with a convolution static, the Linear and
    recurrent layers that remain dynamic.
    """
    engine = quantized_engine()
    used = used_modules(floating, calls)
    reasons: dict[str, str] = {}
    layers = weighted_layers(floating).items()
    kept_float = [name for name, layer in layers if matches(name, skip) or static_refusal(layer, engine)]
    result = copy_module(floating)
    parts: list[TracedPart] = []
    if "static" in method:
        wanted = CONVOLUTIONS if "dynamic" in method else (*CONVOLUTIONS, nn.Linear)
        search = PartSearch(wanted, used, {call.name for call in calls}, engine, kept_float, reasons)
        parts = calibrated_parts(floating, search.parts(floating), calls, reasons)
        for part in parts:
            result = install_part(result, part)
    dynamic: list[str] = []
    if "dynamic" in method:
        for name, layer in list(result.named_modules()):
            if name in used and name not in kept_float and dynamic_refusal(layer) is None:
                result = replace_module(result, name, dynamic_layer(copy.deepcopy(layer)))
                dynamic.append(name)
    recipe = {
        "engine": engine,
        "static": [part.recipe() for part in parts],
        "dynamic": dynamic,
        "float": kept_float,
        "shapes": weight_shapes(floating),
    }
    return _described(floating, result, recipe, used, reasons)


def follow_recipe(floating: nn.Module, recipe: Mapping[str, Any]) -> nn.Module:
    """``floating`` with the structure of the int8 model that ``recipe`` describes; its weights are still to come."""
    if difference := shape_difference(weight_shapes(floating), recipe["shapes"]):  # int8 layers load any shape
        raise QuantizationError(difference)
    pristine = copy_module(floating)
    for entry in recipe["static"]:
        part = part_from_recipe(pristine, entry, engine=recipe["engine"], kept_float=recipe["float"])
        floating = install_part(floating, part)
    for name in recipe["dynamic"]:
        floating = replace_module(floating, name, dynamic_layer(copy.deepcopy(floating.get_submodule(name))))
    return floating


def _described(
    floating: nn.Module, result: nn.Module, recipe: dict[str, Any], used: Mapping[str, Call], reasons: dict[str, str]
) -> Int8Model:
    layers = weighted_layers(floating)
    holders = {entry["name"] for entry in recipe["static"] if entry["is_layer"]}
    now, holders_only = dict(result.named_modules()), containers(floating)
    quantized = [n for n in layers if is_quantized(now[f"{n}.0".lstrip(".") if n in holders else n])]
    skipped = {
        name: _why(name, layer, recipe, used, reasons)
        for name, layer in layers.items()
        if name not in quantized and name not in holders_only
    }
    return Int8Model(result, recipe, tuple(quantized), skipped)


def _why(
    name: str, layer: nn.Module, recipe: Mapping[str, Any], used: Mapping[str, Call], reasons: Mapping[str, str]
) -> str:
    if (refusal := static_refusal(layer, recipe["engine"])) is not None:
        return refusal
    if name in recipe["float"]:
        return "named in skip"
    if isinstance(layer, nn.MultiheadAttention):
        return "its projections are raw parameters, which torch does not quantize"
    if type(layer).__name__ == "NonDynamicallyQuantizableLinear":
        return "nn.MultiheadAttention reads its float weight"
    if name not in used:
        return "not called on the calibration batches"
    owners = [owner for owner in reasons if owner in ("", name) or name.startswith(f"{owner}.")]
    if type(layer) in (*CONVOLUTIONS, nn.Linear) and owners:
        return reasons[max(owners, key=len)]
    return dynamic_refusal(layer) or "outside the int8 parts"

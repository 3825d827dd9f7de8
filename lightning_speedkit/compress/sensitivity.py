"""How far the outputs move if a layer is quantized: told in float, by rounding its weights and its input.

What it does: a copy of the network computes with values that are rounded as a scheme would round them. Rounding one
layer at a time says which layers hurt most; rounding all of them says what error the scheme has when its arithmetic is
right, so that a larger one can be told from it. When it helps: no engine is asked, and nothing is converted. What it
costs: one forward per layer.

Source: ranking layers by the error that each causes alone is how accuracy-aware quantization decides what stays in
float (NNCF, Intel Neural Compressor).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_speedkit.compress.calls import Call, replay
from lightning_speedkit.compress.float_copy import copy_module
from lightning_speedkit.compress.int8 import weighted_layers
from lightning_speedkit.compress.quality import relative_error

__all__ = ["expected_error", "layer_errors", "rounded_weight"]

_LEVELS = {"static-int8": 63, "dynamic-int8": 63, "weight-only-int8": 127, "weight-only-int4": 7}
_INPUT_LEVELS = 127  # of 7 bits: the fewest that an engine uses where 8-bit products would saturate
_GROUP = 32
_FP8_LARGEST = 448.0  # of float8_e4m3fn


def rounded_weight(weight: Tensor, scheme: str) -> Tensor:
    """``weight`` with the values that ``scheme`` would keep of it, in float.

    int8 schemes have one scale per output channel, with 7 bits where activations are int8 too and 8 where not;
    int4 has one per 32 values of a row; fp8 one per tensor.

    >>> rounded_weight(torch.tensor([[1.0, 0.1, 0.0]]), "weight-only-int4")
    tensor([[1.0000, 0.1429, 0.0000]])
    """
    if scheme == "float32":
        return weight.clone()
    if scheme == "fp8":
        scale = (weight.abs().max() / _FP8_LARGEST).clamp(min=1e-12)
        return (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale
    rows = weight.reshape(weight.shape[0], -1)
    if scheme == "weight-only-int4" and rows.shape[1] % _GROUP == 0:
        rows = rows.reshape(-1, _GROUP)
    scale = (rows.abs().amax(dim=1, keepdim=True) / _LEVELS[scheme]).clamp(min=1e-12)
    return ((rows / scale).round() * scale).reshape(weight.shape)


def _rounded_input(value: Tensor) -> Tensor:
    low, high = value.amin().clamp(max=0), value.amax().clamp(min=0)  # zero is always kept exactly
    scale = ((high - low) / _INPUT_LEVELS).clamp(min=1e-12)
    return (value / scale).round() * scale


def layer_errors(
    floating: nn.Module, calls: Sequence[Call], layers: Sequence[str], *, scheme: str = "static-int8"
) -> dict[str, float]:
    """The relative error of the outputs on ``calls`` with one of ``layers`` rounded at a time, the largest first.

    ``floating`` is in eval mode and not changed.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    >>> errors = layer_errors(net, [Call("", (torch.ones(2, 4),), {})], ["0", "1"])
    >>> sorted(errors), all(0 <= error < 0.1 for error in errors.values())
    (['0', '1'], True)
    """
    twin, expected = copy_module(floating), replay(floating, calls)
    errors = {}
    for name in layers:
        with _rounded(twin, [name], scheme):
            errors[name] = relative_error(expected, replay(twin, calls))
    return dict(sorted(errors.items(), key=lambda item: -item[1]))


def expected_error(floating: nn.Module, calls: Sequence[Call], layers: Sequence[str], scheme: str) -> float:
    """The relative error that ``scheme`` has on ``calls`` with ``layers`` quantized and right arithmetic, about."""
    twin = copy_module(floating)
    with _rounded(twin, layers, scheme):
        return relative_error(replay(floating, calls), replay(twin, calls))


@contextmanager
def _rounded(twin: nn.Module, layers: Sequence[str], scheme: str) -> Iterator[None]:
    found = weighted_layers(twin)
    modules = [found[name] for name in layers if name in found]
    weights = {id(p): p for module in modules for p in module.parameters(recurse=False) if p.ndim >= 2}
    kept = {key: parameter.detach().clone() for key, parameter in weights.items()}
    handles: list[Any] = []
    if scheme in ("static-int8", "dynamic-int8", "fp8"):
        handles += [m.register_forward_pre_hook(_round_arguments, with_kwargs=True) for m in modules]
    if scheme == "static-int8":
        handles += [m.register_forward_hook(_round_output) for m in modules]
    try:
        with torch.no_grad():
            for parameter in weights.values():
                parameter.copy_(rounded_weight(parameter, scheme))
        yield
    finally:
        for handle in handles:
            handle.remove()
        with torch.no_grad():
            for key, parameter in weights.items():
                parameter.copy_(kept[key])


def _round_arguments(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    return tuple(map(_if_floating(_rounded_input), args)), {
        k: _if_floating(_rounded_input)(v) for k, v in kwargs.items()
    }


def _round_output(_: nn.Module, _args: Any, output: Any) -> Any:
    return _if_floating(_rounded_input)(output)


def _if_floating(function: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    def apply(value: Any) -> Any:
        shut = not (isinstance(value, Tensor) and value.is_floating_point()) or not value.numel()
        return value if shut or not bool(torch.isfinite(value).all()) else function(value)

    return apply

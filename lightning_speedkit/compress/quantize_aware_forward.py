"""How a layer computes with rounded weights and inputs, and how it is made to, and back.

A layer is changed by setting its ``__class__`` to a subclass made here, of the same name, and changed back by setting
it back. So the parameters, their names, the keys of the ``state_dict`` and the optimizer know nothing of it, and
``torch.compile`` sees another class and compiles anew. A hook instead would not run where activation checkpointing
repeats a layer's forward, and compiled code does not look for hooks that come later.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from lightning_speedkit.compress.quantize_aware_numbers import ActivationRange, WeightGrid, fake_quantize_activation

__all__ = ["GROUP", "KINDS", "Rounding", "Switch", "change", "change_back", "layer_kind"]

GROUP = 32  # values of an int4 weight that share a scale, as in the engine for it
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
KINDS: tuple[type[nn.Module], ...] = (nn.Linear, *_CONVOLUTIONS, *_TRANSPOSED, nn.MultiheadAttention)
_PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


class Switch:
    """What all layers of a network look at."""

    def __init__(self) -> None:
        self.is_on = False
        self.observes = False


class Rounding:
    """How one layer rounds its weight and its input.

    >>> rounding = Rounding(Switch(), nn.Linear(2, 1), "weight-only-int8", None, None)
    >>> rounding.weight.bits, rounding.activation_bits, rounding.range
    (8, None, None)
    """

    def __init__(
        self,
        switch: Switch,
        layer: nn.Module,
        scheme: str,
        weight_bits: int | None,
        activation_bits: int | None,
    ) -> None:
        weight_only = scheme.startswith("weight-only")
        bits = {"weight-only-int8": 8, "weight-only-int4": 4}.get(scheme, 7) if weight_bits is None else weight_bits
        self.switch = switch
        self.kind = layer_kind(layer)
        self.projects_out = True  # of an attention
        self.weight = WeightGrid(
            bits,
            axis=1 if self.kind in _TRANSPOSED else 0,
            group=GROUP if scheme == "weight-only-int4" else None,
            full=weight_only,
        )
        self.activation_bits = None if weight_only else 8 if activation_bits is None else activation_bits
        self.range: ActivationRange | None = None
        if scheme == "static-int8":
            self.range = ActivationRange(self.activation_bits or 8, next(layer.parameters()).device)

    def input(self, values: Tensor) -> Tensor:
        """An input of the layer, rounded; noted before, where there is a running range and it moves."""
        if self.activation_bits is None or not isinstance(values, Tensor) or not values.is_floating_point():
            return values
        if self.range is None:
            return fake_quantize_activation(values, self.activation_bits)
        if self.switch.observes:
            self.range.observe(values)
        return self.range(values)


def _forward_linear(layer: Any, rounding: Rounding, input: Tensor) -> Tensor:
    return nn.functional.linear(rounding.input(input), rounding.weight(layer.weight), layer.bias)


def _forward_convolution(layer: Any, rounding: Rounding, input: Tensor) -> Tensor:
    result: Tensor = layer._conv_forward(rounding.input(input), rounding.weight(layer.weight), layer.bias)
    return result


def _forward_transposed(layer: Any, rounding: Rounding, input: Tensor, output_size: list[int] | None = None) -> Any:
    with _InPlaceOf(layer, {"weight": rounding.weight(layer.weight)}):
        return rounding.kind.forward(layer, rounding.input(input), output_size)


def _forward_attention(
    layer: Any, rounding: Rounding, inputs: tuple[Tensor, Tensor, Tensor], args: Any, kwargs: Any
) -> Any:
    # attention to itself is computed faster, and is known by the three being one object
    once = {id(tensor): rounding.input(tensor) for tensor in inputs}
    weights = {n: rounding.weight(getattr(layer, n)) for n in _PROJECTIONS if getattr(layer, n, None) is not None}
    out = {"weight": rounding.weight(layer.out_proj.weight)} if rounding.projects_out else {}
    with _InPlaceOf(layer, weights), _InPlaceOf(layer.out_proj, out):
        return rounding.kind.forward(layer, *(once[id(tensor)] for tensor in inputs), *args, **kwargs)


_FORWARDS: dict[type[nn.Module], Callable[..., Any]] = {
    nn.Linear: _forward_linear,
    **dict.fromkeys(_CONVOLUTIONS, _forward_convolution),
    **dict.fromkeys(_TRANSPOSED, _forward_transposed),
    nn.MultiheadAttention: lambda layer, rounding, query, key, value, *args, **kwargs: _forward_attention(
        layer, rounding, (query, key, value), args, kwargs
    ),
}


class _InPlaceOf:
    """Lets a forward of torch read these tensors where it reads parameters, which stay registered."""

    def __init__(self, module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        self._attributes, self._tensors = vars(module), tensors

    def __enter__(self) -> None:
        self._attributes.update(self._tensors)

    def __exit__(self, *error: object) -> None:
        for name in self._tensors:
            del self._attributes[name]


_made: dict[type[nn.Module], type[nn.Module]] = {}  # one for each class, so that compiled code is shared


def _fake_class(original: type[nn.Module]) -> type[nn.Module]:
    """The subclass of a layer's class that rounds while it is switched on; of the same name."""
    if original not in _made:
        _made[original] = _make_fake_class(original)
    return _made[original]


def _make_fake_class(original: type[nn.Module]) -> type[nn.Module]:
    plain = original.forward

    def run(self: Any, args: Any, kwargs: Any) -> Any:
        rounding: Rounding = self._rounding
        if not rounding.switch.is_on:
            return plain(self, *args, **kwargs)
        return _FORWARDS[rounding.kind](self, rounding, *args, **kwargs)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        # a copy or a pickle is of the plain class, and without what belongs to this training
        reduced: Any = original.__reduce_ex__(self, protocol)
        _, arguments, state, *rest = reduced
        arguments = tuple(original if part is type(self) else part for part in arguments)
        state = {key: value for key, value in state.items() if key != "_rounding"}
        return (original.__new__, arguments[:1], state, *rest)

    names: dict[str, Any] = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "__reduce_ex__": __reduce_ex__,
        "forward": functools.wraps(plain)(lambda self, *args, **kwargs: run(self, args, kwargs)),
        "_plain_class": original,
    }
    return type(original.__name__, (original,), names)


def change(layer: nn.Module, rounding: Rounding) -> None:
    """Let ``layer`` compute by ``rounding`` from now on, wherever its switch is on."""
    vars(layer)["_rounding"] = rounding
    layer.__class__ = _fake_class(type(layer))


def change_back(layer: nn.Module) -> None:
    """Make ``layer`` what it was before :func:`change`; does nothing to one that is plain."""
    plain = vars(type(layer)).get("_plain_class")
    if plain is not None:  # else someone else has put it back already
        layer.__class__ = plain
        vars(layer).pop("_rounding", None)


def layer_kind(layer: nn.Module) -> type[nn.Module]:
    """Which of :data:`KINDS` a layer is of, itself or by inheritance.

    >>> layer_kind(nn.Linear(1, 1)).__name__
    'Linear'
    """
    return next(kind for kind in KINDS if isinstance(layer, kind))

"""Fake quantization of a whole network: which of its layers are rounded, when, and the network plain again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from lightning_speedkit.compress.calls import inside_metrics
from lightning_speedkit.compress.choice import check_choice
from lightning_speedkit.compress.module_names import matches
from lightning_speedkit.compress.quantize_arguments import check_skip
from lightning_speedkit.compress.quantize_aware_forward import (
    GROUP,
    KINDS,
    Rounding,
    Switch,
    change,
    change_back,
    layer_kind,
)
from lightning_speedkit.compress.quantize_aware_numbers import ActivationRange, restore_range, update_ranges

__all__ = ["FAKE_SCHEMES", "FakeQuantization", "check_fake_scheme"]

FAKE_SCHEMES = ("static-int8", "dynamic-int8", "weight-only-int8", "weight-only-int4")


class FakeQuantization:
    """Fake quantization of the layers of ``module``, for a training loop of your own.

    Weights are rounded at each call while it is on, and so are the inputs of the layers. Nothing but the layers'
    classes changes, until :meth:`remove`.

    Args:
        module: The network. Linear, convolution and multi-head attention layers are changed.
        scheme: ``"static-int8"`` rounds inputs to a running range, which :meth:`update` advances; ``"dynamic-int8"``
            (Linear and attention only) to the range that they have; ``"weight-only-int8"`` and ``"weight-only-int4"``
            (Linear and attention only) leave them alone. Int4 has a scale for each 32 inputs.
        skip: Names of modules that stay as they are; ``*`` and ``?`` are wildcards. One that matches none is an error.
        weight_bits: By default what the name says, but 7 with rounded inputs: a CPU without VNNI adds up 8 bits
            wrongly, and int8 engines leave one out there.
        activation_bits: Of rounded inputs, 8 by default.

    Attributes:
        layers: The names of the changed layers.
        skipped: Why each other layer with a weight is not changed.

    Raises:
        ValueError: An argument is not one of those.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> fake = FakeQuantization(net, "weight-only-int8", weight_bits=2)
    >>> with torch.no_grad():
    ...     _ = net[0].weight.copy_(torch.tensor([[1.0, 0.3], [-0.2, 0.1]]))
    >>> fake.switch_on()
    >>> net(torch.eye(2)).sub(net[0].bias).detach().shape, list(net.state_dict())
    (torch.Size([2, 2]), ['0.weight', '0.bias'])
    >>> fake.remove()
    >>> type(net[0]) is nn.Linear
    True
    """

    def __init__(
        self,
        module: nn.Module,
        scheme: str = "static-int8",
        *,
        skip: Sequence[str] = (),
        weight_bits: int | None = None,
        activation_bits: int | None = None,
    ) -> None:
        check_fake_scheme(scheme, weight_bits, activation_bits)
        skip = check_skip(module, skip)
        self.scheme = scheme
        self.skipped: dict[str, str] = {}
        self._switch = Switch()
        self._changed: dict[str, tuple[nn.Module, Rounding]] = {}
        self._encoder_layers: dict[nn.TransformerEncoderLayer, int] = {}
        metrics = inside_metrics(module)
        for name, layer in module.named_modules():
            if isinstance(layer, nn.TransformerEncoderLayer):
                self._encoder_layers[layer] = layer.activation_relu_or_gelu
            if name in metrics or not any(is_lazy(p) or p.ndim >= 2 for p in layer.parameters(recurse=False)):
                continue
            if (why := _refusal(name, layer, scheme, skip)) is not None:
                self.skipped[name] = why
                continue
            rounding = Rounding(self._switch, layer, scheme, weight_bits, activation_bits)
            rounding.projects_out = not matches(f"{name}.out_proj", skip)
            self._changed[name] = (layer, rounding)
        for name in set(self.layers) & set(self.skipped):  # which an attention calls by its weight
            del self.skipped[name]
        for layer, rounding in self._changed.values():
            change(layer, rounding)

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers that are changed."""
        names = []
        for name, (_, rounding) in self._changed.items():
            names.append(name)
            if rounding.kind is nn.MultiheadAttention and rounding.projects_out:
                names.append(f"{name}.out_proj".lstrip("."))
        return tuple(names)

    @property
    def observes(self) -> bool:
        """Whether the ranges of inputs are noted while it is on, for :meth:`update`."""
        return self._switch.observes

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """The running range of the inputs of each layer that has one."""
        return {n: (float(r.low), float(r.high)) for n, r in self._ranges().items() if r.known}

    def switch_on(self, observe: bool = True) -> None:
        """Round from now on; with ``observe`` also note the ranges of inputs, for :meth:`update`."""
        self._switch.is_on, self._switch.observes = True, observe
        for layer in self._encoder_layers:
            layer.activation_relu_or_gelu = 0  # else its fused path reads the weights behind the layers' backs

    def switch_off(self) -> None:
        """Compute as if nothing were changed."""
        self._switch.is_on = False
        for layer, value in self._encoder_layers.items():
            layer.activation_relu_or_gelu = value

    def update(self, reduce: Callable[[Tensor], Tensor] | None = None) -> None:
        """Take what was observed since the last update into the running ranges; see :func:`update_ranges`."""
        update_ranges(list(self._ranges().values()), reduce)

    def remove(self) -> None:
        """Make the layers plain again. The ranges stay readable."""
        self.switch_off()
        for layer, _ in self._changed.values():
            change_back(layer)

    def state_dict(self) -> dict[str, Tensor]:
        """The running ranges: a tensor of two numbers for each layer that has one."""
        ranges = self._ranges().items()
        return {name: torch.stack([one.low, one.high]).cpu() for name, one in ranges if one.known}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Put back ranges that :meth:`state_dict` gave; names that are not here are passed over."""
        for name, one in self._ranges().items():
            if name in state:
                restore_range(one, *state[name].tolist())

    def _ranges(self) -> dict[str, ActivationRange]:
        return {name: rounding.range for name, (_, rounding) in self._changed.items() if rounding.range is not None}


def _refusal(name: str, layer: nn.Module, scheme: str, skip: Sequence[str]) -> str | None:
    """Why a layer with a weight stays as it is, or ``None``."""
    if matches(name, skip):
        return "named in skip"
    if not isinstance(layer, KINDS):
        return f"{type(layer).__name__} is not among the layers that are quantized"
    if any(is_lazy(parameter) for parameter in layer.parameters(recurse=False)):
        return "its weight has no shape yet; run the network once before training"
    if parametrize.is_parametrized(layer):
        return "its weight is parametrized"
    # one of this name only, so that a subclass is not taken whose forward does something else; activation checkpointing
    # makes subclasses of the same name
    if type(layer).__name__ != layer_kind(layer).__name__:
        return f"{type(layer).__name__} is a subclass, whose forward may do something else"
    if scheme != "static-int8" and isinstance(layer, _ConvNd):
        return f"{scheme} leaves convolutions in float"
    if scheme == "weight-only-int4" and any(p.ndim == 2 and p.shape[1] % GROUP for p in layer.parameters()):
        return f"its inputs cannot be divided into groups of {GROUP}"
    return None


def check_fake_scheme(scheme: Any, weight_bits: Any, activation_bits: Any) -> None:
    """Raise for a scheme, or a number of bits, that is not allowed."""
    check_choice("scheme", scheme, FAKE_SCHEMES)
    for name, bits in (("weight_bits", weight_bits), ("activation_bits", activation_bits)):
        if bits is None:
            continue
        if isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 8:
            raise ValueError(f"{name}={bits!r} is not allowed; it is a whole number of bits from 2 to 8, or None.")
    if activation_bits is not None and scheme.startswith("weight-only"):
        raise ValueError(f"activation_bits={activation_bits} has no effect with {scheme!r}, which rounds weights only.")

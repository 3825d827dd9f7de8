"""Training with the matrix products of linear layers in 8-bit floating point, by torchao.

What it does: for one run, ``nn.Linear`` layers compute their three products (output, gradient of the input, gradient of
the weight) in float8 with scales found at every step; the rest runs under bfloat16 autocast. Weights, gradients,
optimizer state, names of parameters and checkpoints are those of the plain model, and after the run its layers are the
plain ones again.

When it helps: large linear layers, on a device that multiplies float8: NVIDIA Ada and Hopper and later (compute
capability 8.9), AMD MI300 and later; with ``torch.compile``, which fuses the casts. What it costs: precision of 3 bits
(e4m3) and 2 bits (e5m2) of mantissa in those products, and the casts, which may outweigh the gain in small layers or
without compilation.

Source: Micikevicius et al., FP8 Formats for Deep Learning, 2022; ``torchao.float8``; asked for in litgpt #1788.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from typing_extensions import override

from lightning_speedkit.errors import HardwareNeedError, MissingExtraError
from lightning_speedkit.precision.mixed import SpeedkitMixedPrecision

__all__ = ["Float8Precision", "Float8Swap"]

_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
_MULTIPLE = 16  # of both sizes of a layer; the float8 products of the hardware take no others
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Float8Swap:
    """The linear layers of a model, exchanged for float8 ones that share their parameters, and the way back.

    Taken are layers that are exactly ``nn.Linear``, whose sizes are multiples of 16, that carry no hook, no forward of
    their own and no parametrization, and that ``skip`` does not name.

    Args:
        model: Changed in place.
        recipe: ``"tensorwise"``, ``"rowwise"`` or ``"rowwise_with_gw_hp"``, as torchao names them.
        skip: Paths of layers to leave, or globs of them, such as ``"head"`` or ``"*.gate"``.
        emulate: Whether to round as float8 does and multiply in full precision, on any device, slowly.

    Raises:
        MissingExtraError: torchao is not installed.
        MisconfigurationException: There is no layer to take, or an entry of ``skip`` names no linear layer.
    """

    def __init__(
        self, model: nn.Module, recipe: str = "tensorwise", skip: Sequence[str] = (), emulate: bool = False
    ) -> None:
        try:
            torchao: Any = importlib.import_module("torchao.float8")
        except ImportError as error:
            raise MissingExtraError("fp8 training", extra="fp8", library="torchao") from error
        found = dict(model.named_modules(remove_duplicate=False))
        _refuse_what_names_nothing(skip, found)
        chosen = {path: layer for path, layer in found.items() if _can_be_float8(layer) and not _named(path, skip)}
        chosen.pop("", None)
        if not chosen:
            linear = [path for path, layer in found.items() if isinstance(layer, nn.Linear)]
            raise MisconfigurationException(
                f"fp8 computes plain nn.Linear layers whose two sizes are multiples of {_MULTIPLE}, and "
                f"{type(model).__name__} has none to take ({len(linear)} linear layers, skip={list(skip)!r}). "
                f"Use 'bf16-mixed'."
            )
        config = torchao.Float8LinearConfig.from_recipe_name(recipe)
        config = dataclasses.replace(config, emulate=emulate, pad_inner_dim=True)  # batches of any number of rows
        made = {layer: torchao.convert_to_float8_training(layer, config=config) for layer in set(chosen.values())}
        self.paths = tuple(chosen)
        self._places: list[tuple[nn.Module, str, Any, Any]] = []
        for path, layer in chosen.items():
            parent, _, name = path.rpartition(".")
            made[layer].train(layer.training)
            setattr(found[parent], name, made[layer])
            self._places.append((found[parent], name, layer, made[layer]))

    def undo(self) -> None:
        """Put the plain layers back, with the parameters and the mode that the float8 ones have now."""
        for parent, name, plain, float8 in self._places:
            there: Any = getattr(parent, name, None)
            if there is float8:
                plain.weight, plain.bias = there.weight, there.bias
                plain.train(there.training)
                setattr(parent, name, plain)
        self._places = []


def _can_be_float8(layer: nn.Module) -> bool:
    return (
        type(layer) is nn.Linear
        and layer.in_features % _MULTIPLE == 0
        and layer.out_features % _MULTIPLE == 0
        and "forward" not in vars(layer)
        and not any(getattr(layer, hooks) for hooks in _HOOKS)
    )


def _named(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def _refuse_what_names_nothing(skip: Sequence[str], found: Mapping[str, nn.Module]) -> None:
    linear = [path for path, layer in found.items() if isinstance(layer, nn.Linear)]
    for pattern in skip:
        if not any(_named(path, [pattern]) for path in linear):
            inside = any(_named(path, [f"{pattern}.*"]) for path in linear)
            hint = f"For those inside it, write {pattern + '.*'!r}. " if inside else ""
            shown = ", ".join(map(repr, linear[:8])) + (", ..." if len(linear) > 8 else "")
            raise MisconfigurationException(
                f"skip: {pattern!r} names no linear layer, so nothing would be left out by it. {hint}"
                f"The linear layers of the model: {shown or 'none'}."
            )


class Float8Precision(SpeedkitMixedPrecision):
    """Linear layers in float8, the rest in bfloat16: ``Trainer(plugins=[Float8Precision()])``.

    Args:
        recipe: How scales are chosen: ``"tensorwise"`` (one per tensor), ``"rowwise"`` (one per row: closer
            to bfloat16) or ``"rowwise_with_gw_hp"`` (the same, with the gradient of the weight in bfloat16).
        skip: Paths of layers that stay in bfloat16, or globs of them; the output layer is a usual one.
        emulate: Whether to compute what float8 would, slowly and on any device; for tests.

    Raises:
        ValueError: ``recipe`` is not known.
        TypeError: ``skip`` is no list of strings, or ``emulate`` no truth value.
        HardwareNeedError: At the start of a run, on a device that does not multiply float8.
        MissingExtraError: At the start of a run: torchao is not installed.
        MisconfigurationException: At the start of a run: the model has no layer that can be computed in float8, an
            entry of ``skip`` names no linear layer, or the recipe cannot be emulated there.

    >>> plugin = Float8Precision(skip=["head"])
    >>> plugin.recipe, plugin.precision
    ('tensorwise', 'bf16-mixed')
    """

    def __init__(self, recipe: str = "tensorwise", skip: list[str] | None = None, emulate: bool = False) -> None:
        if recipe not in _RECIPES:
            raise ValueError(f"recipe={recipe!r} is not known; use one of {', '.join(map(repr, _RECIPES))}.")
        given = [] if skip is None else skip
        if not isinstance(given, (list, tuple)) or not all(isinstance(path, str) for path in given):
            raise TypeError(f"skip={skip!r} must be a list of paths of layers, such as ['head', 'blocks.*.gate'].")
        if not isinstance(emulate, bool):
            raise TypeError(f"emulate={emulate!r} must be True or False; got {type(emulate).__name__}.")
        super().__init__("bf16-mixed")
        self.recipe, self.skip, self.emulate = recipe, list(given), emulate
        self._swap: Float8Swap | None = None

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the layers that run in float8; empty outside a run."""
        return () if self._swap is None else self._swap.paths

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        module = super().convert_module(module)
        if isinstance(module, pl.LightningModule):
            device = module.trainer.strategy.root_device
            if not self.emulate:
                _refuse_device(device)
            elif device.type != "cuda" and self.recipe == "rowwise_with_gw_hp":
                # torchao's layers look at the autocast of CUDA only, so types would be mixed in the backward pass
                raise MisconfigurationException(
                    f"recipe='rowwise_with_gw_hp' cannot be emulated on {device.type!r}; use 'rowwise' or 'tensorwise'."
                )
            self._undo()
            self._swap = Float8Swap(module, self.recipe, self.skip, self.emulate)
        return module

    @override
    def teardown(self) -> None:
        self._undo()
        super().teardown()

    def _undo(self) -> None:
        if self._swap is not None:
            self._swap.undo()
            self._swap = None


def _refuse_device(device: torch.device) -> None:
    if device.type != "cuda":
        here = f"the device {device.type!r}"
    elif torch.version.hip is not None:
        architecture = str(getattr(torch.cuda.get_device_properties(device), "gcnArchName", "")).partition(":")[0]
        if architecture in ("gfx942", "gfx950", "gfx1200", "gfx1201"):
            return
        here = f"{torch.cuda.get_device_name(device)} ({architecture})"
    else:
        capability = torch.cuda.get_device_capability(device)
        if capability >= (8, 9):
            return
        here = f"{torch.cuda.get_device_name(device)} of compute capability {capability[0]}.{capability[1]}"
    raise HardwareNeedError(
        f"fp8 training needs a device that multiplies float8: NVIDIA of compute capability 8.9 or higher (L4, RTX 40, "
        f"H100 and later), or AMD MI300 and later; this run is on {here}. Use 'bf16-mixed' or 'precision-auto' instead."
    )

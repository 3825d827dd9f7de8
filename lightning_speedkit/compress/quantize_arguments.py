"""Checks of what a user gives to be quantized: names, batches, and whether the float model answers them at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_speedkit.compress.calls import Call, replay
from lightning_speedkit.compress.conversion import call_of
from lightning_speedkit.compress.float_copy import refuse_lazy
from lightning_speedkit.compress.int8 import containers, weighted_layers
from lightning_speedkit.compress.module_names import check_names, matches, plain_name
from lightning_speedkit.errors import QuantizationError, did_you_mean

__all__ = ["calls_from", "check_float_answers", "check_skip"]


def check_skip(model: nn.Module, skip: object) -> list[str]:
    """The names as a list of their own, if each matches a module of ``model``: what one misspells would be quantized.

    Raises:
        TypeError: ``skip`` is no list of names.
        ValueError: An entry matches no module.

    >>> check_skip(nn.Sequential(nn.Linear(2, 1)), ["0", "?"])
    ['0', '?']
    """
    names = check_names("skip", skip)
    modules = [plain_name(name) for name, _ in model.named_modules() if name]
    for entry in names:
        if not any(matches(name, [entry]) for name in modules):
            layers = [plain_name(name) for name in weighted_layers(model) if name not in containers(model)]
            known = ", ".join(map(repr, layers[:12])) or "none"
            raise ValueError(
                f"skip={entry!r} matches no module.{did_you_mean(entry, modules, most=1)} Layers: {known}."
            )
    return names


def calls_from(model: object, batches: object, caller: str) -> list[Call]:
    """The calls of ``model`` on ``batches``, as ``caller`` was given them.

    Raises:
        TypeError: ``model`` is no module, or ``batches`` is one batch and not a list of batches.
        ValueError: There is no batch.
        QuantizationError: A layer of the model has no shape or no values yet.
    """
    if not isinstance(model, nn.Module):
        what = "the class itself, so write it with its arguments" if isinstance(model, type) else f"{model!r:.100}"
        raise TypeError(f"{caller}() takes an nn.Module, got {what}.")
    if isinstance(batches, (Tensor, Mapping, str, bytes)) or not isinstance(batches, Iterable):
        kind = type(batches).__name__
        raise TypeError(f"{caller}() takes a list of batches to calibrate with, got one {kind}; write [batch].")
    calls = [call_of(batch) for batch in batches]
    if not calls:
        raise ValueError(f"{caller}() needs at least one batch to calibrate and check with, got none.")
    refuse_lazy(model)
    return calls


def check_float_answers(floating: nn.Module, calls: Sequence[Call]) -> None:
    """QuantizationError if the float model cannot be called so, or answers with NaN: no copy can be compared with it.

    >>> check_float_answers(nn.Linear(2, 1), [Call("", (torch.ones(3, 2),), {})])
    """
    try:
        answers = replay(floating, calls)
    except Exception as error:  # the code of the user
        text = " ".join(str(error).split())
        raise QuantizationError(
            f"The float model cannot be called on the batches ({type(error).__name__}: {text:.300}). A batch is a "
            "tensor, a tuple or list of positional arguments, or a dict of keyword arguments of its forward; labels "
            "are none."
        ) from error
    if any(bool(torch.isnan(tensor).any()) for tensor in answers):
        raise QuantizationError(
            "The float model answers the batches with NaN, so no copy can be compared with it. Look for NaN in its "
            "weights (has the training diverged?) and in the batches."
        )

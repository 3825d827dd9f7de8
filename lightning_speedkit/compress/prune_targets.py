"""The weights of a model that pruning works on, by name.

These are the weights of linear layers, convolutions, attention projections and recurrent layers that are trained:
where the computing is. Biases, normalisation and embeddings stay as they are; they are few, or looked up. A weight that
several layers share is one weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from lightning_speedkit.compress.module_names import matches, plain_name
from lightning_speedkit.errors import did_you_mean

__all__ = ["frozen_weights", "prunable_weights"]

_LAYERS = (nn.Linear, _ConvNd, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)


def prunable_weights(model: nn.Module, skip: Sequence[str] = (), pattern: str | None = None) -> dict[str, nn.Parameter]:
    """The weights that can be pruned, by their names in ``model.named_parameters()``.

    Args:
        model: The model to look in.
        skip: Names of layers, of modules that hold layers, or of parameters to leave as they are; ``*`` and ``?`` are
            wildcards.
        pattern: ``"2:4"`` if all of them are to have this pattern.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: Nothing is left to prune, an entry of ``skip`` matches nothing that could be pruned, or a layer has
            a number of inputs that does not go with the pattern.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    >>> list(prunable_weights(model)), list(prunable_weights(model, skip=["2"]))
    (['0.weight', '2.weight'], ['0.weight'])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"What is pruned is a torch.nn.Module, got {model!r:.100}.")
    names, candidates = _candidates(model)
    _refuse_lazy(candidates)
    unused = [entry for entry in skip if not any(matches(n, [entry]) for p in candidates.values() for n in names[p])]
    if unused:
        raise ValueError(_unmatched(unused[0], [n for p in candidates.values() for n in names[p]]))
    skipped = {name for name, p in candidates.items() if any(matches(n, skip) for n in names[p])}
    kept = {name: p for name, p in candidates.items() if name not in skipped and p.requires_grad}
    if not kept:
        raise ValueError(_nothing(model, len(candidates), len(skipped)))
    if pattern is not None:
        _refuse_widths(kept, pattern)
    return kept


def frozen_weights(model: nn.Module, skip: Sequence[str] = ()) -> dict[str, nn.Parameter]:
    """Those weights that :func:`prunable_weights` leaves out only because they are frozen.

    >>> list(frozen_weights(nn.Linear(4, 8).requires_grad_(False)))
    ['weight']
    """
    names, candidates = _candidates(model)
    skipped = {n for n, p in candidates.items() if any(matches(known, skip) for known in names[p])}
    return {n: p for n, p in candidates.items() if n not in skipped and not p.requires_grad}


def _candidates(model: nn.Module) -> tuple[dict[nn.Parameter, list[str]], dict[str, nn.Parameter]]:
    """All names of each parameter, and the weights of layers by their first."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(plain_name(name))
    found = {id(p) for layer in model.modules() if isinstance(layer, _LAYERS) for p in _weights_of(layer)}
    return names, {names[p][0]: p for p in names if id(p) in found}


def _weights_of(layer: nn.Module) -> Iterator[nn.Parameter]:
    # the weight of a parametrized layer (weight norm, spectral norm, torch.nn.utils.prune) is computed from others
    for name, parameter in layer.named_parameters(recurse=False):
        lazy = isinstance(parameter, UninitializedParameter)
        if "weight" in name and not name.endswith(("_orig", "_g", "_v")) and (lazy or parameter.ndim >= 2):
            yield parameter


def _refuse_lazy(weights: dict[str, nn.Parameter]) -> None:
    lazy = [name for name, weight in weights.items() if isinstance(weight, UninitializedParameter)]
    if lazy:
        raise ValueError(
            f"{lazy[0]!r} has no shape yet: a lazy layer gets it with its first batch. Run the model once on a batch "
            "before it is pruned."
        )


def _unmatched(entry: str, names: list[str]) -> str:
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    hint = did_you_mean(entry, [*layers, *names], most=1)
    known = ", ".join(map(repr, layers[:12])) or "none"
    return f"skip={entry!r} matches no layer that could be pruned.{hint} There are: {known}."


def _nothing(model: nn.Module, candidates: int, skipped: int) -> str:
    if candidates:
        frozen = candidates - skipped
        return (
            f"There is nothing to prune in {type(model).__name__}: of {candidates} weights of layers, {skipped} are in "
            f"skip and {frozen} are frozen (requires_grad is False)."
        )
    computed = any(parametrize.is_parametrized(part) for part in model.modules())
    why = " Weights of parametrized layers are computed from others and are left alone." if computed else ""
    if any(isinstance(part, torch.jit.ScriptModule) for part in model.modules()):
        why = " Scripted modules are not looked into: prune before torch.jit.script."
    return (
        f"There is nothing to prune in {type(model).__name__}: it has no weight of a linear, convolutional, attention "
        f"or recurrent layer.{why}"
    )


def _refuse_widths(weights: dict[str, nn.Parameter], pattern: str) -> None:
    odd = [f"{name!r} ({weight.shape[1]})" for name, weight in weights.items() if weight.shape[1] % 4]
    if odd:
        raise ValueError(
            f"pattern={pattern!r} needs numbers of inputs that are multiples of 4, and these weights have others: "
            f"{', '.join(odd)}. Name their layers in skip."
        )

"""Which layers of a model can be replaced by lighter ones, why the others cannot, and the replacing itself."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from lightning_speedkit.architecture.depthwise import separate_convolution
from lightning_speedkit.architecture.low_rank import factor_linear
from lightning_speedkit.errors import did_you_mean

__all__ = ["copy_model", "find_layers", "lighter_layer", "replace_layers_"]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_REPLACED = (nn.Linear, *_CONVOLUTIONS)
_OTHERS = (nn.RNNBase, nn.RNNCellBase, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Bilinear)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def find_layers(model: nn.Module, skip: Sequence[str] = ()) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """The layers that can be replaced, by name, and the reason for every other one that has a weight matrix.

    A module that is registered under several names is listed under its first.

    >>> layers, left = find_layers(nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3, groups=8)))
    >>> list(layers), left
    (['0'], {'1': 'it has 8 groups already'})
    """
    _check_skip(model, skip)
    owners: dict[int, dict[int, str]] = {}  # of each parameter, the modules that hold it
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), {})[id(module)] = name
    attention = [name for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)]
    layers: dict[str, nn.Module] = {}
    left: dict[str, str] = {}
    for name, module in model.named_modules():
        if name in attention:
            left[name] = "nn.MultiheadAttention keeps its projections as one parameter"
        elif isinstance(module, _OTHERS):
            left[name] = f"{type(module).__name__} is not replaced"
        elif isinstance(module, _REPLACED):
            if any(name.startswith(f"{one}." if one else "") for one in attention):
                left[name] = "nn.MultiheadAttention reads its weight directly"
            elif any(fnmatchcase(part, pattern) for part in _paths(name) for pattern in skip):
                left[name] = "named in skip"
            elif why := _refusal(module, owners):
                left[name] = why
            else:
                layers[name] = module
    return layers, left


def lighter_layer(layer: nn.Module, groups: int, rank: int, *, warm_start: bool) -> nn.Module:
    """What replaces ``layer``, which :func:`find_layers` has found.

    >>> type(lighter_layer(nn.Linear(8, 8), 1, 2, warm_start=True)).__name__
    'FactoredLinear'
    """
    if isinstance(layer, nn.Linear):
        return factor_linear(layer, rank, warm_start=warm_start)
    if isinstance(layer, _CONVOLUTIONS):
        return separate_convolution(layer, groups, rank, warm_start=warm_start)
    raise TypeError(f"{type(layer).__name__} is neither a linear layer nor a convolution.")


def replace_layers_(model: nn.Module, replacements: Mapping[str, nn.Module]) -> nn.Module:
    """Puts each replacement where the layer of that name is, under all its names, and returns the model.

    The name ``""`` is the model itself, in which case the replacement is returned. A ``nn.TransformerEncoderLayer``
    that gets one leaves torch's fused path, which would read whole weight matrices.

    >>> replace_layers_(nn.Sequential(nn.ReLU()), {"0": nn.Tanh()})[0]
    Tanh()
    """
    if "" in replacements:
        return replacements[""]
    by_identity = {id(model.get_submodule(name)): new for name, new in replacements.items()}
    touched: list[nn.Module] = []
    for parent in list(model.modules()):
        for key, child in list(parent.named_children()) + _repeated_children(parent):
            if id(child) in by_identity:
                setattr(parent, key, by_identity[id(child)])
                touched.append(parent)
    for parent in touched:
        if isinstance(parent, nn.TransformerEncoderLayer):
            parent.activation_relu_or_gelu = 0
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder) and any(one in touched for one in encoder.layers):
            encoder.use_nested_tensor = False
    return model


def copy_model(model: nn.Module) -> nn.Module:
    """A deep copy without gradients.

    Raises:
        TypeError: ``model`` is no module, or is wrapped or compiled.
        ValueError: It has parameters without a shape yet, or cannot be copied.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a torch.nn.Module, got {type(model).__name__}.")
    for name, module in model.named_modules():
        wrapper = type(module).__name__
        if wrapper in ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule"):
            raise TypeError(f"{name or 'The model'} is wrapped in {wrapper}; lighten the model before it is wrapped.")
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise TypeError(f"{name or 'The model'} is compiled; lighten the model before it is compiled.")
    if lazy := [name for name, parameter in model.named_parameters() if is_lazy(parameter)]:
        raise ValueError(
            f"The parameter {lazy[0]!r} has no shape before the first forward. Run one batch, then lighten."
        )
    try:
        twin = copy.deepcopy(model)
    except Exception as error:  # user code may raise anything
        raise ValueError(f"The model cannot be copied ({type(error).__name__}: {error}).") from error
    for parameter in twin.parameters():
        parameter.grad = None
    return twin


def _refusal(layer: nn.Module, owners: Mapping[int, Mapping[int, str]]) -> str | None:
    weight = layer._parameters.get("weight")
    if is_parametrized(layer) or weight is None or any(key.endswith("_orig") for key in layer._parameters):
        return "its weight is computed at each call (a parametrization, weight norm or pruning)"
    if type(layer) not in _REPLACED:
        return f"{type(layer).__name__} is a class of its own, whose forward may do more"
    if type(weight) is not nn.Parameter or type(weight.data) is not Tensor:
        return f"its weight is a {type(weight.data).__name__}"
    if "forward" in vars(layer) or any(getattr(layer, hooks, None) for hooks in _HOOKS):
        return "it has hooks or a forward of its own"
    for parameter in layer.parameters(recurse=False):
        if others := [other for owner, other in owners[id(parameter)].items() if owner != id(layer)]:
            return f"it shares a parameter with {others[0] or 'the model itself'}"
    if isinstance(layer, _CONVOLUTIONS) and layer.groups != 1:
        return f"it has {layer.groups} groups already"
    if not weight.is_floating_point():
        return f"its weight is of {weight.dtype}"
    if not weight.is_meta and not bool(torch.isfinite(weight).all()):
        return "its weight is not finite"
    return None


def _check_skip(model: nn.Module, skip: Sequence[str]) -> None:
    if isinstance(skip, str):
        raise TypeError(f"skip={skip!r} is a list of names: skip=[{skip!r}].")
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for pattern in skip:
        if not any(fnmatchcase(name, pattern) for name in names):
            hint = did_you_mean(pattern, names, most=3, cutoff=0.5)
            raise ValueError(f"skip: the model has no module {pattern!r}.{hint}")


def _paths(name: str) -> Iterator[str]:
    """``a.b.c``, ``a.b`` and ``a``."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _repeated_children(parent: nn.Module) -> list[tuple[str, nn.Module]]:
    """Those that :meth:`~torch.nn.Module.named_children` leaves out: the same module under a further name."""
    first = {name for name, _ in parent.named_children()}
    return [(name, child) for name, child in parent._modules.items() if child is not None and name not in first]

"""What each parameter of a module is trained with: its learning rate and its weight decay.

What it does: leaves out what is frozen, takes a parameter that two layers share once, puts no weight decay on biases
and on the parameters of norms, and lets the learning rate fall from layer to layer towards the input if asked.

When it helps: weight decay on a norm's scale or on a bias pulls it to 0 without regularising anything (Loshchilov and
Hutter's decay is meant for weight matrices; excluded since BERT, arXiv 1810.04805). Layer-wise decay of the learning
rate keeps the early layers of a pretrained model close to what they know (ULMFiT, arXiv 1801.06146; ELECTRA, arXiv
2003.10555). What it costs: more groups, so a few more kernels per step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import UninitializedParameter

from lightning_speedkit.optimize.optimizer_options import checked_flag, checked_number, unknown_name

__all__ = ["ParameterSetting", "check_settings", "layer_numbers", "parameter_groups", "parameter_settings"]

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(frozen=True, slots=True, eq=False)
class ParameterSetting:
    """One trainable parameter and what it is trained with. ``layer`` counts from the input, if layers differ."""

    name: str
    parameter: nn.Parameter
    lr: float
    weight_decay: float
    layer: int | None = None


def parameter_settings(
    module: nn.Module,
    lr: float,
    weight_decay: float = 0.0,
    *,
    layer_decay: float = 1.0,
    layers: Sequence[str] | None = None,
    decay_all: bool = False,
) -> list[ParameterSetting]:
    """The settings of all parameters with ``requires_grad``, in the order of ``named_parameters()``.

    Args:
        module: Any module. Parameters that it shares are taken once, under their first name.
        lr: The learning rate of the last layer.
        weight_decay: That of weights. Parameters of fewer than two dimensions, of norms, and with ``bias`` in their
            name get 0, unless ``decay_all``.
        layer_decay: The learning rate of a layer is that of the next one towards the output times this; above 0, at
            most 1.
        layers: The layers as prefixes of parameter names, from input to output; see :func:`layer_numbers`.
        decay_all: Decay everything alike.

    Raises:
        ValueError: A number is out of range; nothing is trainable; a parameter is not initialised yet, or has lost
            its shape in FSDP; ``layers`` is given without ``layer_decay``; or a layer cannot be found.
        TypeError: An argument is of the wrong kind.

    >>> net = nn.Sequential(nn.Linear(2, 4), nn.LayerNorm(4), nn.Linear(4, 1, bias=False))
    >>> for s in parameter_settings(net, lr=0.1, weight_decay=0.05, layer_decay=0.5):
    ...     print(s.name, s.lr, s.weight_decay)
    0.weight 0.025 0.05
    0.bias 0.025 0.0
    1.weight 0.05 0.0
    1.bias 0.05 0.0
    2.weight 0.1 0.05
    """
    check_settings(lr, weight_decay, layer_decay, layers, decay_all)
    lr, weight_decay, layer_decay = float(lr), float(weight_decay), float(layer_decay)
    _check(module)
    numbers = layer_numbers(module, layers) if layer_decay < 1 else {}
    top = max(numbers.values(), default=0)
    of_norms = {id(p) for m in module.modules() if isinstance(m, _NORMS) for p in m.parameters(recurse=False)}
    settings = []
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        plain = parameter.ndim >= 2 and "bias" not in name.rpartition(".")[2] and id(parameter) not in of_norms
        layer = numbers.get(name)
        scale = 1.0 if layer is None else layer_decay ** (top - layer)
        settings.append(
            ParameterSetting(name, parameter, lr * scale, weight_decay if plain or decay_all else 0.0, layer)
        )
    return settings


def check_settings(
    lr: float, weight_decay: float, layer_decay: float, layers: Sequence[str] | None, decay_all: bool
) -> None:
    """Raise as :func:`parameter_settings` does for its arguments, before there is a module."""
    checked_number("lr", lr, 0)
    checked_number("weight_decay", weight_decay, 0)
    checked_number("layer_decay", layer_decay, 0, 1, above=True)
    checked_flag("decay_all", decay_all)
    if layers is None:
        return
    if isinstance(layers, str) or not isinstance(layers, Sequence):
        raise TypeError(f"layers={layers!r} must be a list of the beginnings of parameter names, from input to output.")
    if not layers or layer_decay == 1:
        what = "is empty" if not layers else "has no effect without a layer_decay below 1"
        raise ValueError(f"layers={list(layers)} {what}. Set both, or leave layers out.")


def _check(module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"The module itself is asked for, not its parameters; got {type(module).__name__}.")
    parameters = list(module.named_parameters())
    for name, parameter in parameters:
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(f"{name} has no shape yet. Send a batch through the module before building an optimizer.")
    if not any(parameter.requires_grad for _, parameter in parameters):
        raise ValueError(
            f"{type(module).__name__} has nothing to train: none of its {len(parameters)} parameters requires a "
            "gradient. Set requires_grad on those that are to be trained."
        )
    if any(isinstance(m, FullyShardedDataParallel) for m in module.modules()):
        raise ValueError(
            "FSDP makes each parameter a flat piece, so weights cannot be told from biases. Use "
            "ModelParallelStrategy, whose parameters keep their shape, or build the optimizer yourself."
        )


def layer_numbers(module: nn.Module, layers: Sequence[str] | None = None) -> dict[str, int]:
    """The layer of each parameter, by name, counted from the input.

    Without ``layers``, each child of an outermost ``Sequential`` or ``ModuleList`` is a layer. What is registered
    before the first of them (a stem, embeddings) is layer 0, what stands between two belongs to the one before, and
    what follows the last (the final norm, the head) is one layer. This takes the order of registration for that of
    computation. With ``layers``, a parameter belongs to the longest prefix of its name, and to one last layer if there
    is none.

    Raises:
        ValueError: There is no such list of layers, or nothing begins with one of ``layers``.

    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.stem, self.head = nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)
    ...         self.blocks = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))
    >>> layer_numbers(Net(), ["stem", "blocks.0", "blocks.1"])
    {'stem.weight': 0, 'head.weight': 3, 'blocks.0.weight': 1, 'blocks.1.weight': 2}
    """
    names = [name for name, _ in module.named_parameters()]
    if layers is not None:
        return _numbers_by_prefix(names, layers)
    blocks = [_block(module, name) for name in names]
    if not any(blocks):
        raise ValueError(
            f"The layers of {type(module).__name__} cannot be told: it has no Sequential or ModuleList of several "
            "layers. Name them from input to output: layers=['stem', 'encoder.0', ...]."
        )
    last = max(index for index, block in enumerate(blocks) if block)
    seen: dict[str, int] = {}
    first = 0 if blocks[0] else 1
    numbers = {}
    for index, (name, block) in enumerate(zip(names, blocks, strict=True)):
        if block:
            numbers[name] = seen.setdefault(block, first + len(seen))
        else:
            numbers[name] = max(0, first + len(seen) - (0 if index > last else 1))
    return numbers


def _block(module: nn.Module, name: str) -> str:
    """The path of the layer that a parameter is in, or nothing."""
    path = name.split(".")[:-1]
    for depth, child in enumerate(path):
        is_list = isinstance(module, (nn.Sequential, nn.ModuleList))
        if is_list and sum(any(True for _ in m.parameters()) for m in module.children()) > 1:
            return ".".join(path[: depth + 1])
        module = module.get_submodule(child)
    return ""


def _numbers_by_prefix(names: Sequence[str], layers: Sequence[str]) -> dict[str, int]:
    def matches(name: str, prefix: str) -> bool:
        return name == prefix or name.startswith(f"{prefix}.")

    for prefix in layers:
        if not any(matches(name, prefix) for name in names):
            paths = {".".join(name.split(".")[: n + 1]) for name in names for n in range(name.count("."))}
            raise unknown_name("layer", prefix, sorted(paths))
    numbers = {}
    for name in names:
        found = [(len(prefix), number) for number, prefix in enumerate(layers) if matches(name, prefix)]
        numbers[name] = max(found)[1] if found else len(layers)
    return numbers


def parameter_groups(settings: Iterable[ParameterSetting]) -> list[dict[str, Any]]:
    """The settings as the groups that an optimizer of torch takes: one for each pair of rate and decay.

    Where there are several, each has a ``name`` of its own, which LearningRateMonitor shows.

    >>> net = nn.Linear(2, 1)
    >>> [(g["name"], g["lr"], g["weight_decay"]) for g in parameter_groups(parameter_settings(net, 0.1, 0.01))]
    [('decay', 0.1, 0.01), ('no_decay', 0.1, 0.0)]
    """
    groups: dict[tuple[int | None, float, float], dict[str, Any]] = {}
    for s in settings:
        key = (s.layer, s.lr, s.weight_decay)
        group = groups.setdefault(key, {"params": [], "lr": s.lr, "weight_decay": s.weight_decay})
        group["params"].append(s.parameter)
    if len(groups) > 1:
        taken: set[str] = set()
        for (layer, _, weight_decay), group in groups.items():
            stem = ("" if layer is None else f"layer_{layer}_") + ("decay" if weight_decay else "no_decay")
            name, count = stem, 1
            while name in taken:
                count += 1
                name = f"{stem}_{count}"
            taken.add(name)
            group["name"] = name
    return list(groups.values())

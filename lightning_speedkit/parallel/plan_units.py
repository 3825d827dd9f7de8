"""Which modules of a model are sharded as one unit: gathered together before their forward, freed after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_speedkit.errors import did_you_mean

__all__ = ["check_parameters", "find_units", "named_uses", "shared_names"]

# their forward is never called, or not with the weights of their own children
_NO_FORWARD = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_TAKES_CHILDREN_APART = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def named_uses(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Every name of every parameter; a parameter that several modules have comes several times."""
    for path, child in module.named_modules():
        for name, parameter in child.named_parameters(recurse=False):
            yield f"{path}.{name}" if path else name, parameter


def shared_names(module: nn.Module) -> dict[nn.Parameter, list[str]]:
    """The parameters with more than one name (tied weights), with their names.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> net[1].weight = net[0].weight
    >>> list(shared_names(net).values())
    [['0.weight', '1.weight']]
    """
    found: dict[nn.Parameter, list[str]] = {}
    for name, parameter in named_uses(module):
        found.setdefault(parameter, []).append(name)
    return {parameter: names for parameter, names in found.items() if len(names) > 1}


def check_parameters(module: nn.Module) -> None:
    """Refuse what FSDP2 cannot shard: parameters without a dimension, or that have no size yet.

    Raises:
        MisconfigurationException: It names them and says what to do.
    """
    lazy = [name for name, p in module.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
    if lazy:
        raise MisconfigurationException(
            f"The parameters {lazy} have no size yet, so they cannot be sharded. Run one batch through the model in "
            "LightningModule.setup, or use layers that know their size."
        )
    scalars = [name for name, p in module.named_parameters() if p.dim() == 0]
    if scalars:
        raise MisconfigurationException(
            f"The parameters {scalars} have no dimension, and FSDP2 shards the first one. Give them the shape (1,)."
        )


def find_units(
    module: nn.Module, classes: Sequence[str] | None, min_parameters: int
) -> tuple[list[str], dict[str, str]]:
    """The names of the modules to shard one by one, inner ones first; what is in none of them belongs to the root.

    Args:
        module: The whole model.
        classes: Names of classes of modules; ``None`` goes by size.
        min_parameters: By size: the least number of parameters of a unit, without those of units in it.

    Returns:
        The names, and why others that were asked for are left to the root, by name.

    Raises:
        MisconfigurationException: No module has that class.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 2)))
    >>> find_units(net, None, 18), find_units(net, ["Sequential"], 18)
    ((['1.0', '1.1'], {}), (['1'], {}))
    """
    if classes is not None:
        _check_classes(module, classes)
    shared = shared_names(module)
    names: list[str] = []
    left: dict[str, str] = {}
    taken: set[nn.Parameter] = set()
    for name, child in _inner_first(module, "", apart=classes is None):
        own = [p for p in child.parameters() if p not in taken]
        if not own or isinstance(child, _NO_FORWARD):
            continue
        asked = type(child).__name__ in classes if classes is not None else _count(own) >= min_parameters
        if not asked:
            continue
        outside = [n for p in own for n in shared.get(p, []) if not n.startswith(name + ".")]
        if outside:
            left[name] = f"its weights are tied to {outside[0]!r}"
        else:
            names.append(name)
            taken.update(own)
    return names, left


def _count(parameters: Sequence[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters)


def _check_classes(module: nn.Module, classes: Sequence[str]) -> None:
    known = {type(m).__name__ for m in module.modules() if m is not module and next(m.parameters(), None) is not None}
    for name in classes:
        if name not in known:
            raise MisconfigurationException(
                f"shard_class names {name!r}, and no module with parameters has that class.{did_you_mean(name, known)} "
                f"There are {', '.join(sorted(known)) or 'none'}."
            )


def _inner_first(module: nn.Module, path: str, apart: bool) -> Iterator[tuple[str, nn.Module]]:
    seen: set[nn.Module] = set()

    def walk(parent: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        for name, child in parent.named_children():
            if child in seen:
                continue
            seen.add(child)
            if not (apart and isinstance(child, _TAKES_CHILDREN_APART)):
                yield from walk(child, f"{prefix}{name}.")
            yield f"{prefix}{name}", child

    return walk(module, path)

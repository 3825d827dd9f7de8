"""Which modules of a model are meant: by class name, by path, by glob of paths, or the repeated blocks by themselves.

The blocks that ``"auto"`` finds are the modules of which a container (``Sequential``, ``ModuleList``, ``ModuleDict``)
holds two or more of one class, that have parameters, and that are more than one layer: the transformer blocks, the
residual blocks, the stages of a network. Of nested ones the outermost count, but a plain ``Sequential`` that itself
holds repeated blocks only groups them. Where torch.compile has wrapped a module, the one inside the wrapper is meant.
What it costs: one walk over the modules, before training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from lightning_speedkit.errors import nearest_names
from lightning_speedkit.memory.recomputation import plain_class

__all__ = ["checked_selection", "find_blocks", "select_modules"]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def find_blocks(model: nn.Module) -> tuple[str, ...]:
    """The paths of the repeated blocks of a model, outermost only, in the order of ``named_modules``.

    >>> block = lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    >>> find_blocks(nn.Sequential(nn.Linear(4, 4), block(), block(), nn.Linear(4, 1)))
    ('1', '2')
    """
    return tuple(_blocks_under(model, ""))


def select_modules(model: nn.Module, modules: str | Sequence[str]) -> tuple[str, ...]:
    """The paths of the modules that a selection means, nested ones included, in the order of ``named_modules``.

    Args:
        model: The model to look in.
        modules: ``"auto"``, or one or more of: a class name (``"Block"``), a path (``"encoder.layers.3"``), a glob
            of paths in which ``*`` stands for one name between dots (``"encoder.layers.*"``).

    Raises:
        ValueError: If an entry means nothing here, or something that is never called as a module.
        TypeError: If ``modules`` is neither a string nor a list of strings.

    >>> select_modules(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), "Linear")
    ('0', '2')
    """
    wanted = checked_selection(modules)
    if wanted == ("auto",):
        blocks = find_blocks(model)
        if not blocks:
            raise ValueError(
                "modules='auto' found no repeated blocks: no Sequential, ModuleList or ModuleDict of the model holds "
                f"two modules of one class that are more than a single layer. Name what to take. {_inventory(model)}"
            )
        return blocks
    selected: set[str] = set()
    for entry in wanted:
        selected.update(_matches(model, entry))
    return tuple(path for path, _ in model.named_modules() if path in selected)


def checked_selection(modules: str | Sequence[str]) -> tuple[str, ...]:
    """The entries of a selection as a tuple of strings, or what is wrong with it.

    >>> checked_selection("Block")
    ('Block',)
    """
    entries = (modules,) if isinstance(modules, str) else modules
    if not isinstance(entries, (list, tuple)) or not all(isinstance(entry, str) for entry in entries):
        raise TypeError(f"modules is a name or a list of names of modules, got {modules!r}.")
    if not entries or not all(entry.strip() for entry in entries):
        raise ValueError(f"modules={modules!r} names nothing; give class names or paths of modules, or 'auto'.")
    if "auto" in entries and len(entries) > 1:
        raise ValueError(f"modules={modules!r} mixes 'auto' with names; give 'auto' alone, or names.")
    return tuple(entries)


def _blocks_under(parent: nn.Module, prefix: str) -> Iterable[str]:
    count: Counter[type] = Counter()
    if isinstance(parent, _CONTAINERS):
        count.update(_own_class(_uncompiled("", child)[1]) for child in set(parent.children()))
    for name, child in parent.named_children():
        path, child = _uncompiled(f"{prefix}.{name}" if prefix else name, child)
        inner = tuple(_blocks_under(child, path))
        own = _own_class(child)
        repeated = count[own] >= 2 and _is_more_than_a_layer(child)
        if repeated and not (own is nn.Sequential and inner):
            yield path
        else:
            yield from inner


def _is_more_than_a_layer(module: nn.Module) -> bool:
    if isinstance(module, _NEVER_CALLED) and type(module).forward is nn.Module.forward:
        return False
    if next(module.children(), None) is not None:
        return next(module.parameters(), None) is not None
    # Without children it is a single layer, unless it is somebody's own class that computes with a matrix itself.
    known = any(cls.__module__.startswith("torch.") and cls is not nn.Module for cls in type(module).__mro__)
    return not known and any(parameter.ndim >= 2 for parameter in module.parameters())


def _own_class(module: nn.Module) -> type[nn.Module]:
    # Without what checkpointing and fully_shard put in front of it; the latter makes an FSDPBlock of a Block.
    own = plain_class(type(module))
    return own.__mro__[2] if own.__bases__[0].__name__ == "FSDPModule" else own


def _uncompiled(path: str, module: nn.Module) -> tuple[str, nn.Module]:
    # torch.compile(module) is a module of its own around it, whose class has no say in what is computed.
    inner = getattr(module, "_orig_mod", None)
    return (f"{path}._orig_mod", inner) if isinstance(inner, nn.Module) else (path, module)


def _matches(model: nn.Module, entry: str) -> list[str]:
    paths = {module: path for path, module in model.named_modules()}
    meant = {  # a module may also be at a second path, which named_modules() does not tell by itself
        _uncompiled(path, module)[1] if path else module: None
        for path, module in model.named_modules(remove_duplicate=False)
        if _own_class(module).__name__ == entry or _is_at(path, entry)
    }
    found = [paths[module] for module in meant]
    if not found:
        raise ValueError(f"modules: there is no class and no path {entry!r} in the model. {_inventory(model, entry)}")
    if found == [""]:
        raise ValueError(
            f"modules: {entry!r} is the whole model. Take the blocks inside it: recomputing all of it at once saves "
            f"no memory. {_inventory(model)}"
        )
    for path in found:
        module = model.get_submodule(path)
        if isinstance(module, _NEVER_CALLED) and type(module).forward is nn.Module.forward:
            raise ValueError(
                f"modules: {path!r} is a {type(module).__name__}, which is a list and is never called. "
                f"Take what it holds: '{path}.*'."
            )
    return [path for path in found if path]


def _is_at(path: str, pattern: str) -> bool:
    names, globs = path.split("."), pattern.split(".")
    return len(names) == len(globs) and all(map(fnmatchcase, names, globs)) and bool(path)


def _inventory(model: nn.Module, wanted: str = "") -> str:
    count = Counter(_own_class(module).__name__ for path, module in model.named_modules() if path)
    paths = [path for path, module in model.named_modules() if path and not isinstance(module, _NEVER_CALLED)]
    near = nearest_names(wanted, [*count, *paths], most=3) if wanted else []
    rank = {name: place - len(near) for place, name in enumerate(near)}  # below 0, the nearest first
    names = sorted(count, key=lambda name: (rank.get(name, 0), -count[name]))
    paths.sort(key=lambda path: (rank.get(path, 0), path.count(".")))
    if not names:
        return "The model has no submodules."
    shown = ", ".join(f"{name} (x{count[name]})" for name in names[:8]) + (", ..." if len(names) > 8 else "")
    hint = f"Did you mean {' or '.join(map(repr, near))}? " if near else ""
    return f"{hint}Classes in it: {shown}. Paths, for example: {', '.join(map(repr, paths[:5]))}."

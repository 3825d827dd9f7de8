"""The modules among which a memory budget chooses, and how they lie in each other and equal each other.

By themselves these are the repeated blocks, the modules that hold several of them, the composite modules inside a block
(an attention, a branch) and those beside the blocks; where nothing repeats, the composite modules two levels deep.
What cannot be recomputed is left out, and what is named and cannot be is an error.
What it costs: a walk over the modules.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from lightning_speedkit.measure.sync_batch_norm import holds_sync_batch_norm
from lightning_speedkit.memory.block_selection import find_blocks, select_modules
from lightning_speedkit.memory.checkpoint_budget_model import ModuleProfile
from lightning_speedkit.memory.checkpoint_budget_search import Unit, walk_units
from lightning_speedkit.memory.checkpoint_policy_refusals import (
    SYNC_BATCH_NORM,
    refuse_what_cannot_be_exchanged,
)
from lightning_speedkit.memory.recomputation import Recomputed

__all__ = ["candidate_paths", "units_of"]


def candidate_paths(model: nn.Module, candidates: str | Sequence[str]) -> tuple[str, ...]:
    """The paths of the candidates in the order of ``named_modules``; they may lie inside each other.

    >>> block = lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    >>> candidate_paths(nn.Sequential(nn.Linear(4, 4), nn.Sequential(block(), block())), "auto")
    ('1', '1.0', '1.1')
    """
    for path, module in model.named_modules():
        if isinstance(module, Recomputed):
            raise ValueError(
                f"budget: {path or 'the model'!r} is checkpointed already, and the plan starts from the plain model. "
                f"Call uncheckpoint_modules(model) before."
            )
    if candidates != "auto":
        named = select_modules(model, candidates)
        for path in named:
            _refuse(path, model.get_submodule(path))
        return named
    found = [path for path in _by_themselves(model) if _can_be(path, model.get_submodule(path))]
    if not found:
        raise ValueError(
            "budget: the model has no composite modules that could be checkpointed, only single layers and itself. "
            "Put the layers that belong together into modules (nn.Sequential), or name candidates."
        )
    return tuple(found)


def units_of(model: nn.Module, profile: Mapping[str, ModuleProfile]) -> list[Unit]:
    """The profiled modules as units in the order of the profile, equal ones with the same, middle seconds."""
    units = [_unit(model, path, profile) for path in _outermost(profile)]
    seconds: dict[object, list[float]] = {}
    for unit in walk_units(units):
        seconds.setdefault(unit.kind, []).append(unit.seconds)
    middle = {kind: statistics.median(values) for kind, values in seconds.items()}
    return [_with_seconds(unit, middle) for unit in units]


def _unit(model: nn.Module, path: str, profile: Mapping[str, ModuleProfile]) -> Unit:
    below = {other: profile[other] for other in profile if other.startswith(f"{path}.")}
    inside = tuple(_unit(model, inner, below) for inner in _outermost(below))
    told = profile[path]
    kind = (
        type(model.get_submodule(path)),
        (told.saved_bytes, told.kept_bytes, told.transient_bytes),
        tuple((inner.path[len(path) :], inner.kind) for inner in inside),
    )
    return Unit(path, kind, told.saved_bytes, told.seconds, inside)


def _with_seconds(unit: Unit, seconds: Mapping[object, float]) -> Unit:
    inside = tuple(_with_seconds(inner, seconds) for inner in unit.inside)
    return replace(unit, seconds=seconds[unit.kind], inside=inside)


def _outermost(paths: Mapping[str, ModuleProfile]) -> list[str]:
    return [path for path in paths if not any(path.startswith(f"{other}.") for other in paths)]


def _by_themselves(model: nn.Module) -> list[str]:
    blocks = find_blocks(model)
    if not blocks:
        outer = _composite_under(model, "")
        taken = {*outer, *(inner for path in outer for inner in _composite_under(model.get_submodule(path), path))}
        return [path for path, _ in model.named_modules() if path in taken]
    taken = set(blocks)
    for path, module in model.named_modules():
        held = sum(block.startswith(f"{path}.") for block in blocks)
        if path and held > 1 and _is_called(module):
            taken.add(path)
    for block in blocks:
        taken.update(_composite_under(model.get_submodule(block), block))
    # Composite modules beside the blocks: neither inside one nor around one.
    beside = [path for path, module in model.named_modules() if path and _is_composite(module)]
    for path in beside:
        related = any(path.startswith(f"{other}.") or other.startswith(f"{path}.") for other in (*blocks, *taken))
        if path not in taken and not related:
            taken.add(path)
    return [path for path, _ in model.named_modules() if path in taken]


def _composite_under(parent: nn.Module, prefix: str) -> list[str]:
    """The outermost composite modules below one."""
    found = []
    for name, child in parent.named_children():
        path = f"{prefix}.{name}".lstrip(".")
        found += [path] if _is_composite(child) else _composite_under(child, path)
    return found


def _is_composite(module: nn.Module) -> bool:
    return _is_called(module) and any(True for _ in module.children()) and any(True for _ in module.parameters())


def _is_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _refuse(path: str, module: nn.Module) -> None:
    refuse_what_cannot_be_exchanged(path, module)
    if holds_sync_batch_norm(module):
        raise ValueError(SYNC_BATCH_NORM.format(path=path))


def _can_be(path: str, module: nn.Module) -> bool:
    try:
        _refuse(path, module)
    except ValueError:
        return False
    return True

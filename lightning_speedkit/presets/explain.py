"""What a selection of presets would set on this machine, without building or refusing anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_speedkit.measure import read_hardware
from lightning_speedkit.presets.catalogue import REGISTRY
from lightning_speedkit.presets.merge import Chosen, Setting, expand, merge
from lightning_speedkit.presets.needs import missing_needs
from lightning_speedkit.presets.selection import Given, accelerator_of, hardware_for, needs_left, nodes_of

__all__ = ["Explanation", "explain"]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What :func:`explain` found.

    ``settings`` are what is set, each with the presets it comes from. ``undecided`` names the presets that depend on
    a device which is not here. ``needs`` are those of the presets of which something is used, and ``missing`` says in
    words which of them this machine lacks; empty where the selection can run.
    """

    presets: tuple[Chosen, ...]
    settings: tuple[Setting, ...]
    undecided: tuple[str, ...]
    needs: tuple[str, ...]
    missing: tuple[str, ...]


def explain(names: Sequence[str]) -> Explanation:
    """What these presets together set here. Raises for an unknown name and for a conflict, not for a lack.

    >>> [setting.describe() for setting in explain(["fp32"]).settings]
    ["precision='32-true'"]
    """
    chosen = expand(names, REGISTRY)
    settings = merge(chosen)
    hardware = hardware_for(accelerator_of(settings, Given()))
    if hardware is not None:
        settings = merge(chosen, hardware)
    needs = dict.fromkeys(need for one in chosen for need in needs_left(one, settings, Given(), hardware))
    return Explanation(
        presets=chosen,
        settings=settings,
        undecided=tuple(one.preset.name for one in chosen if hardware is None and callable(one.preset.patch)),
        needs=tuple(needs),
        missing=missing_needs(needs, hardware or read_hardware("auto"), num_nodes=nodes_of(settings, Given())),
    )

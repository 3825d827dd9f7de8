"""Decides which channels of a network go, as plain data that another process can follow."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_speedkit.compress.calls import Call, batch_size
from lightning_speedkit.compress.shrink_check import unsound_groups
from lightning_speedkit.compress.shrink_choice import choose_channels, cuts_of, why_none_goes
from lightning_speedkit.compress.shrink_graph import ChannelGroup, find_groups
from lightning_speedkit.compress.shrink_heads import attention_layouts
from lightning_speedkit.compress.shrink_sizes import tensor_sizes

__all__ = ["ShrinkPlan", "ShrinkSettings", "few_samples", "plan_shrink"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrinkSettings:
    """What may be removed; see :func:`~lightning_speedkit.compress.shrink.shrink_model`."""

    ratio: float = 0.5
    head_ratio: float = 0.0
    criterion: str = "magnitude"
    skip: tuple[str, ...] = ()
    round_to: int = 1
    across_norms: bool = False

    def part(self, done: int, steps: int) -> ShrinkSettings:
        """These settings after ``done`` of ``steps`` equal steps.

        >>> ShrinkSettings(ratio=0.6).part(1, 2).ratio
        0.3
        """
        share = done / steps
        return replace(self, ratio=self.ratio * share, head_ratio=self.head_ratio * share)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrinkPlan:
    """Which indices of which tensors stay, the width of each layer before and after, and why others keep theirs."""

    cuts: Mapping[str, Mapping[int, Sequence[int]]]
    layers: Mapping[str, tuple[int, int]]
    skipped: Mapping[str, str]


def plan_shrink(
    root: nn.Module,
    calls: Sequence[Call],
    settings: ShrinkSettings,
    *,
    original: Mapping[str, Sequence[int]] | None = None,
    gradients: Mapping[str, Tensor] | None = None,
) -> ShrinkPlan:
    """What to cut from ``root``, a float copy on the CPU in eval mode that is called as ``calls`` say.

    ``original`` has the shapes of tensors that were cut before; ratios are of those.
    """
    calls = [few_samples(call) for call in calls]
    groups, skipped = find_groups(root, calls, skip=settings.skip, across_norms=settings.across_norms)
    gone: dict[str, tuple[int, ...]] = {}
    heads: set[str] = set()  # the attentions that lose some, or have lost some before
    for group in groups:
        ratio = settings.head_ratio if group.kind == "heads" else settings.ratio
        if ratio <= 0:
            continue
        full = _original_channels(root, group, original or {})
        gone[group.name] = choose_channels(
            root,
            group,
            ratio,
            original=full,
            criterion=settings.criterion,
            round_to=settings.round_to,
            gradients=gradients,
        )
        if not gone[group.name] and full == group.channels:
            skipped[group.name] = why_none_goes(group, ratio, original=full, round_to=settings.round_to)
        elif group.kind == "heads":
            heads.add(group.name)
    unsound = unsound_groups(root, calls, groups, gone)
    skipped.update(unsound)
    for name in _makers_of_heads(root, heads - unsound.keys()):
        skipped.pop(name, None)
    gone = {name: channels for name, channels in gone.items() if channels and name not in unsound}
    return ShrinkPlan(
        cuts=cuts_of(root, groups, gone),
        layers={
            group.name: (group.channels, group.channels - len(gone[group.name]))
            for group in groups
            if group.name in gone
        },
        skipped=skipped,
    )


def _makers_of_heads(root: nn.Module, attentions: Collection[str]) -> list[str]:
    """The layers that make the queries, keys and values of these attentions, whose rows go with the heads."""
    layouts = attention_layouts(root)
    return [f"{name}.{layer}".lstrip(".") for name in attentions for layer in layouts[name].inputs]


def few_samples(call: Call, most: int = 2) -> Call:
    """The same call with only the first samples of its batch; tensors of another length are passed whole."""
    size = batch_size(call)

    def first(tensor: Tensor) -> Tensor:
        return tensor[:most] if tensor.ndim > 0 and len(tensor) == size else tensor

    with torch.no_grad():
        return Call(
            call.name,
            apply_to_collection(call.args, Tensor, first, allow_frozen=True),
            apply_to_collection(dict(call.kwargs), Tensor, first, allow_frozen=True),
        )


def _original_channels(root: nn.Module, group: ChannelGroup, original: Mapping[str, Sequence[int]]) -> int:
    part = group.parts[0]
    if part.tensor not in original:
        return group.channels
    now = tensor_sizes(root)[part.tensor][part.dim]
    return round(group.channels * original[part.tensor][part.dim] / now)

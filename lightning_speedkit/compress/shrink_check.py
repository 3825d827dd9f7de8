"""Makes sure, before a network is cut, that without the channels it computes what it computes with zeros there.

A graph followed by autograd says nothing of a reshape with fixed numbers, of a softmax over channels, or of a part that
only runs in training. So each plan is tried on a copy: the outputs have to be those of the whole network in which the
layers that read the channels have zeros for them, and the copy has to run in train mode. Groups that fail are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_speedkit.compress.calls import Call, replay
from lightning_speedkit.compress.float_copy import copy_module
from lightning_speedkit.compress.quality import relative_error
from lightning_speedkit.compress.shrink_choice import cuts_of
from lightning_speedkit.compress.shrink_graph import ChannelGroup
from lightning_speedkit.compress.shrink_sizes import cut, named_tensors

__all__ = ["hidden_copy", "unsound_groups"]

# relative to the outputs: sums in another order differ by so much
_NOISE = 1e-5
# and relative to what hiding the channels does to the outputs: a wrong channel differs by more
_SHARE = 1e-3
_DRAWS = 3


def hidden_copy(root: nn.Module, groups: Sequence[ChannelGroup], gone: Mapping[str, Sequence[int]]) -> nn.Module:
    """A copy of ``root`` of the same size in which whatever reads the channels ``gone`` has zeros for them."""
    twin = copy_module(root)
    tensors = named_tensors(twin)
    with torch.no_grad():
        for group in groups:
            channels = set(gone.get(group.name, ()))
            for part in group.parts if channels else ():
                if part.reads:
                    indices = sorted({index for index, channel in part.pairs if channel in channels})
                    tensors[part.tensor].index_fill_(part.dim, torch.tensor(indices), 0.0)
    return twin


def unsound_groups(
    root: nn.Module, calls: Sequence[Call], groups: Sequence[ChannelGroup], gone: Mapping[str, Sequence[int]]
) -> dict[str, str]:
    """Why each group that cannot lose its channels ``gone`` cannot; empty if all can. ``root`` is not changed."""
    groups = [group for group in groups if gone.get(group.name)]
    if not groups or _fault(root, calls, groups, gone) is None:
        return {}
    reasons: dict[str, str] = {}
    sound: list[ChannelGroup] = []
    for group in groups:  # together with those found sound, so that what is left is sound together
        fault = _fault(root, calls, [*sound, group], gone)
        if fault is None:
            sound.append(group)
        else:
            reasons[group.name] = fault
    return reasons


def _fault(
    root: nn.Module, calls: Sequence[Call], groups: Sequence[ChannelGroup], gone: Mapping[str, Sequence[int]]
) -> str | None:
    exact = [group for group in groups if group.exact]
    try:
        small = _cut_copy(root, exact, gone)
        expected, error, effect = _compared(root, calls, exact, gone)
        for seed in range(_DRAWS if exact else 0):
            if effect > _NOISE:
                break
            # units that are dead for these samples hide any fault; it does not depend on the weights
            _, error, effect = _compared(_drawn_copy(root, seed), calls, exact, gone)
        if not error <= _NOISE + _SHARE * min(effect, 1.0):
            return f"without its channels the rest computes something else (outputs differ by {error:.2g})"
        if len(exact) < len(groups):
            small = _cut_copy(root, groups, gone)
            outputs = replay(small, calls)
            if [out.shape for out in outputs] != [out.shape for out in expected]:
                return "without its channels the outputs have another shape"
            if not all(bool(torch.isfinite(out).all()) for out in outputs):
                return "without its channels the outputs are not finite"
    except Exception as failure:  # the code of the user, with sizes that it may not expect
        return f"without its channels the network does not run ({type(failure).__name__}: {_line(failure)})"
    try:
        replay(copy_module(root).train(), calls)
    except Exception:  # it does not run in train mode as it is, with these inputs
        return None
    try:
        replay(small.train(), calls)
    except Exception as failure:
        return f"without its channels the network does not run in train mode ({_line(failure)})"
    return None


def _compared(
    root: nn.Module, calls: Sequence[Call], groups: Sequence[ChannelGroup], gone: Mapping[str, Sequence[int]]
) -> tuple[list[Tensor], float, float]:
    """What is expected of the cut network, how far it is from that, and how far the whole one is."""
    expected = replay(hidden_copy(root, groups, gone), calls)
    error = relative_error(expected, replay(_cut_copy(root, groups, gone), calls))
    return expected, error, relative_error(expected, replay(root, calls))


def _drawn_copy(root: nn.Module, seed: int) -> nn.Module:
    """A copy with other weights: of a size that keeps signals alive, and a little above zero."""
    twin = copy_module(root)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.is_floating_point() and parameter.ndim > 1:
                drawn = torch.randn(parameter.shape, generator=generator) + 0.2
                parameter.copy_(drawn / parameter[0].numel() ** 0.5)
            elif parameter.is_floating_point():
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    return twin


def _cut_copy(root: nn.Module, groups: Sequence[ChannelGroup], gone: Mapping[str, Sequence[int]]) -> nn.Module:
    twin = copy_module(root)
    cut(twin, cuts_of(twin, groups, gone))
    return twin


def _line(failure: Exception) -> str:
    return str(failure).strip().partition("\n")[0][:120]

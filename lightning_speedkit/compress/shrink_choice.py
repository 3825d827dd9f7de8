"""Chooses which channels of each group go: the least important ones, as many as the ratio asks for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_speedkit.compress.shrink_graph import ChannelGroup
from lightning_speedkit.compress.shrink_sizes import named_tensors

__all__ = ["CRITERIA", "channel_scores", "choose_channels", "cuts_of", "kept_count", "why_none_goes"]


def kept_count(channels: int, ratio: float, *, size: int = 1, round_to: int = 1) -> int:
    """How many of ``channels`` stay if the share ``ratio`` goes, when they go by ``size`` and stay by ``round_to``.

    Rounded up, so that never more than the ratio is removed and never all.

    >>> kept_count(10, 0.9), kept_count(33, 0.5), kept_count(33, 0.5, round_to=8), kept_count(12, 0.5, size=4)
    (1, 17, 24, 8)
    """
    step = math.lcm(size, round_to)
    wanted = max(1, math.ceil(channels * (1 - ratio) - 1e-9))
    return min(channels, math.ceil(wanted / step) * step)


def channel_scores(
    root: nn.Module, group: ChannelGroup, criterion: str, gradients: Mapping[str, Tensor] | None = None
) -> Tensor:
    """How much each channel of the group matters, in float64.

    ``"magnitude"``: the squared weights of a channel in each tensor of the group, over the mean of that tensor's
    channels, so that each tensor has one vote (the group norm of DepGraph). ``"taylor"``: what the loss would change by
    to first order without it, ``|sum(weight * gradient)|`` (Molchanov et al., 2019). ``"random"``: a fixed order that
    depends on nothing but the name of the group.
    """
    return CRITERIA[criterion](root, group, gradients or {})


def _magnitude(root: nn.Module, group: ChannelGroup, _: Mapping[str, Tensor]) -> Tensor:
    scores = torch.zeros(group.channels, dtype=torch.float64)
    for name, values, indices, channels in _weights(root, group, None):
        if name.endswith(".bias"):
            continue
        squares = values.square().reshape(len(values), -1).sum(1)[indices]
        vote = torch.zeros_like(scores).index_add_(0, channels, squares)
        scores += vote / vote.mean().clamp_min(1e-30)
    return scores


def _taylor(root: nn.Module, group: ChannelGroup, gradients: Mapping[str, Tensor]) -> Tensor:
    scores = torch.zeros(group.channels, dtype=torch.float64)
    for _, values, indices, channels in _weights(root, group, gradients):
        change = values.reshape(len(values), -1).sum(1)[indices]
        scores += torch.zeros_like(scores).index_add_(0, channels, change).abs()
    return scores


def _random(_: nn.Module, group: ChannelGroup, __: Mapping[str, Tensor]) -> Tensor:
    generator = torch.Generator().manual_seed(sum(group.name.encode()))
    return torch.rand(group.channels, generator=generator, dtype=torch.float64)


CRITERIA: dict[str, Callable[[nn.Module, ChannelGroup, Mapping[str, Tensor]], Tensor]] = {
    "magnitude": _magnitude,
    "taylor": _taylor,
    "random": _random,
}


def _weights(
    root: nn.Module, group: ChannelGroup, gradients: Mapping[str, Tensor] | None
) -> list[tuple[str, Tensor, Tensor, Tensor]]:
    """Each parameter of the group with the group's dimension first, and the indices and channels of it."""
    parameters = dict(root.named_parameters(remove_duplicate=False))
    found = []
    for part in group.parts:
        if part.tensor not in parameters or (gradients is not None and part.tensor not in gradients):
            continue
        values = parameters[part.tensor].detach().double()
        if gradients is not None:
            values = values * gradients[part.tensor].to(values)
        indices, channels = torch.tensor(part.pairs, dtype=torch.long).unbind(1)
        found.append((part.tensor, values.movedim(part.dim, 0), indices, channels))
    return found


def choose_channels(
    root: nn.Module,
    group: ChannelGroup,
    ratio: float,
    *,
    original: int,
    criterion: str = "magnitude",
    round_to: int = 1,
    gradients: Mapping[str, Tensor] | None = None,
) -> tuple[int, ...]:
    """The channels that go, so that the share ``ratio`` of ``original`` ones is gone afterwards; may be none."""
    size = max(len(members) for members in group.tied)
    keep = kept_count(original, ratio, size=size, round_to=1 if group.kind == "heads" else round_to)
    spare = group.channels - keep
    if spare <= 0 or group.channels < 2:
        return ()
    scores = channel_scores(root, group, criterion, gradients)
    ranked = sorted(group.tied, key=lambda members: float(scores[list(members)].mean()))
    gone: list[int] = []
    for members in ranked:
        if len(gone) + len(members) <= spare and len(gone) + len(members) < group.channels:
            gone.extend(members)
    return tuple(sorted(gone))


def why_none_goes(group: ChannelGroup, ratio: float, *, original: int, round_to: int = 1) -> str:
    """Why :func:`choose_channels` takes none of ``group``, and from which ratio on it would take some."""
    what, argument = ("heads", "head_ratio") if group.kind == "heads" else ("channels", "ratio")
    together = max(len(members) for members in group.tied)
    if original < 2 or together >= original:
        return f"too few {what}: {original}, of which {together} go at a time"
    step = together if group.kind == "heads" else math.lcm(together, round_to)
    most = (original - 1) // step * step  # that stay where any go
    if most < 1:
        return f"round_to={round_to} keeps all of its {original} {what}"
    least = math.ceil((1 - most / original) * 1000) / 1000
    return f"{argument}={ratio:g} of its {original} {what} is less than go at a time; {least:g} or more removes some"


def cuts_of(
    root: nn.Module, groups: Sequence[ChannelGroup], gone: Mapping[str, Sequence[int]]
) -> dict[str, dict[int, list[int]]]:
    """The indices of every tensor that stay if of the group ``name`` the channels ``gone[name]`` go."""
    sizes = {name: tensor.shape for name, tensor in named_tensors(root).items()}
    removed: dict[str, dict[int, set[int]]] = {}
    for group in groups:
        channels = set(gone.get(group.name, ()))
        for part in group.parts if channels else ():
            indices = {index for index, channel in part.pairs if channel in channels}
            removed.setdefault(part.tensor, {}).setdefault(part.dim, set()).update(indices)
    return {
        name: {dim: [i for i in range(sizes[name][dim]) if i not in indices] for dim, indices in dims.items()}
        for name, dims in removed.items()
    }

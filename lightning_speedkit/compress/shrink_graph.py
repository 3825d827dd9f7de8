"""Finds which channels of a network belong together, so that they can only be removed together.

The dependencies between layers come from torch-pruning (G. Fang et al., DepGraph, arXiv 2301.12900), which follows
autograd's graph. Only its indices are used; the cutting is done here, because torch-pruning 1.6.1 makes new parameters
(which an optimizer does not know, and which are trainable even if the old ones were frozen), mixes up the order of a
LayerNorm's weights when few of many are kept, cuts the gates of an LSTM wrongly, and leaves the model in eval mode.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm

from lightning_speedkit.compress.calls import Call, call_with
from lightning_speedkit.compress.module_names import matches
from lightning_speedkit.compress.shrink_heads import attention_layouts
from lightning_speedkit.compress.shrink_sizes import named_tensors
from lightning_speedkit.errors import MissingExtraError, SpeedkitError

__all__ = ["ChannelGroup", "TensorPart", "find_groups", "torch_pruning"]

_AVERAGING = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_TRANSPARENT = (nn.Linear, _ConvNd, _BatchNorm, _InstanceNorm, nn.PReLU, nn.Embedding, *_AVERAGING)


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Indices of one dimension of a tensor, and the channel of the group that each of them carries.

    ``reads`` says that the tensor takes the channels as its input, so that zeros there hide them.
    """

    tensor: str
    dim: int
    pairs: tuple[tuple[int, int], ...]  # (index, channel)
    reads: bool = False


@dataclass(frozen=True, slots=True)
class ChannelGroup:
    """Channels that run through several tensors. ``tied`` holds sets of channels that can only go together.

    ``exact`` says that the rest of the network computes the same without a channel as with zeros in its place.
    """

    name: str
    kind: str  # "channels" or "heads"
    channels: int
    parts: tuple[TensorPart, ...]
    tied: tuple[tuple[int, ...], ...]
    exact: bool


def find_groups(
    root: nn.Module, calls: Sequence[Call], *, skip: Collection[str] = (), across_norms: bool = False
) -> tuple[list[ChannelGroup], dict[str, str]]:
    """The groups of channels that could be removed from ``root``, and why each other layer keeps its own.

    ``root`` is a float copy on the CPU in eval mode. ``skip`` has names of layers that keep their output channels.
    """
    reasons: dict[str, str] = {}
    first = _first_names(root)
    groups = list(_head_groups(root, skip))
    attention = {f"{name}.{layer}".lstrip(".") for name, a in attention_layouts(root).items() for layer in a.inputs}
    for name, items in _items(root, calls):
        reason = _refusal(name, items, skip, attention, across_norms)
        parts: list[TensorPart] = []
        ties: list[tuple[int, ...]] = []
        if reason is None:
            try:
                for item in items:
                    parts.extend(_parts(root, item))
                    ties.extend(_ties(item))
            except _NoPartError as refusal:
                reason = str(refusal)
        if reason is not None:
            reasons[name] = reason
            continue
        parts = [replace(part, tensor=first[part.tensor]) for part in parts]
        channels = 1 + max(channel for part in parts for _, channel in part.pairs)
        groups.append(
            ChannelGroup(
                name=name,
                kind="channels",
                channels=channels,
                parts=tuple(parts),
                tied=_joined(channels, [*ties, *_sharing(parts)]),
                exact=not any(isinstance(item.owner, _AVERAGING) for item in items),
            )
        )
    return _without_conflicts(groups, reasons), reasons


class _NoPartError(Exception):
    pass


class _Raw:
    """Stands for a parameter that no layer of torch owns."""


@dataclass(frozen=True, slots=True)
class _Item:
    """One member of a group: a layer or a parameter, the side of it, and its indices with their channels."""

    name: str
    owner: Any
    reads: bool
    dim: int
    pairs: tuple[tuple[int, int], ...]

    @property
    def makes(self) -> bool:
        """Whether it is a layer that makes the channels from others."""
        return isinstance(self.owner, (nn.Linear, _ConvNd)) and not self.reads


def torch_pruning() -> ModuleType:
    """The library that finds which channels depend on which, or an error with the line that installs it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("torch_pruning")
    except ImportError as error:
        raise MissingExtraError("Removing channels", extra="prune", library="torch-pruning") from error


def _items(root: nn.Module, calls: Sequence[Call]) -> Iterator[tuple[str, list[_Item]]]:
    engine = torch_pruning()
    calls = list({call.name: call for call in reversed(calls)}.values())[::-1]
    names = {id(module): name for name, module in root.named_modules()}
    names.update((id(parameter), name) for name, parameter in root.named_parameters())
    wanted = [parameter for parameter in root.parameters() if parameter.is_floating_point()]
    frozen = [parameter for parameter in wanted if not parameter.requires_grad]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        try:
            for parameter in frozen:
                parameter.requires_grad_(True)
            with torch.inference_mode(False), torch.enable_grad():
                graph = engine.DependencyGraph().build_dependency(
                    root, (), forward_fn=lambda module, _: _outputs(module, calls), verbose=False
                )
            full = list(graph.get_all_groups(ignored_layers=[], root_module_types=[_ConvNd, nn.Linear]))
        except Exception as error:  # whatever the forward or the tracing raises
            raise SpeedkitError(
                f"The graph of {type(root).__name__} could not be followed ({type(error).__name__}: {error})."
            ) from error
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)
    for group in full:
        items = [_item(root, engine, graph, names, group[index]) for index in range(len(group))]
        members = [item for item in items if item is not None]
        makers = {item.name for item in members if item.makes}
        yield next(name for name, _ in root.named_modules() if name in makers), members


def _item(root: nn.Module, engine: ModuleType, graph: Any, names: Mapping[int, str], member: Any) -> _Item | None:
    """A member of a group of torch-pruning, or ``None`` for an operation between layers."""
    target = member.dep.target
    owner, name, dim = target.module, names.get(id(target.module)), -1
    pairs = tuple(zip(member.idxs, member.root_idxs, strict=True))
    if target.type == engine.ops.OPTYPE.OUTPUT:
        return _Item("", None, False, dim, pairs)
    if name is None:
        return None
    if target.type == engine.ops.OPTYPE.PARAMETER:
        holder = name.rpartition(".")[0]
        owner, dim = _Raw(), int(target.pruning_dim)
        parent = root.get_submodule(holder)
        if isinstance(parent, (nn.RMSNorm, nn.RNNBase, nn.MultiheadAttention)):  # which torch-pruning takes apart
            owner, name, dim = parent, holder, -1
    return _Item(name, owner, bool(graph.is_in_channel_pruning_fn(member.dep.handler)), dim, pairs)


def _outputs(root: nn.Module, calls: Sequence[Call]) -> list[Tensor]:
    # multiplied, so that the last layer is followed by something and its channels are seen to be the output
    found: list[Tensor] = []

    def collect(value: Any) -> None:
        if isinstance(value, Tensor):
            if value.grad_fn is not None:
                found.append(value * 1.0)
        elif isinstance(value, dict):
            collect(list(value.values()))
        elif isinstance(value, (list, tuple)):
            for part in value:
                collect(part)
        elif hasattr(value, "__dataclass_fields__"):
            collect([getattr(value, name) for name in value.__dataclass_fields__])

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        collect([args, kwargs])

    def leave(_: nn.Module, __: Any, output: Any) -> Any:
        return apply_to_collection(output, Tensor, Tensor.detach)

    # torch-pruning cannot follow recurrent layers: what goes into them is an output, what comes out of them an input
    recurrent = [module for module in root.modules() if isinstance(module, nn.RNNBase)]
    handles = [module.register_forward_pre_hook(enter, with_kwargs=True) for module in recurrent]
    handles += [module.register_forward_hook(leave) for module in recurrent]
    try:
        for call in calls:
            collect(call_with(root.get_submodule(call.name), call))
    finally:
        for handle in handles:
            handle.remove()
    if not found:
        raise ValueError("no output depends on a parameter")
    return found


def _refusal(
    name: str, items: Sequence[_Item], skip: Collection[str], attention: Collection[str], across_norms: bool
) -> str | None:
    if any(item.owner is None for item in items):
        return "its channels are an output of the network or the input of a recurrent layer"
    for item in items:
        if isinstance(item.owner, nn.MultiheadAttention):
            return f"nn.MultiheadAttention ({item.name}) ties its width to its heads"
        if item.name in attention and not item.reads:
            return "it makes the heads of an attention; head_ratio removes whole ones"
        if isinstance(item.owner, nn.Module) and not isinstance(item.owner, _TRANSPARENT):
            return f"{type(item.owner).__name__} ({item.name}) uses its channels"
    for item in items:
        outputs = not item.reads or not isinstance(item.owner, (nn.Linear, _ConvNd))
        if outputs and matches(item.name, skip):
            return "named in skip" if item.name == name else f"tied to {item.name}, which is named in skip"
    for item in items:
        if isinstance(item.owner, _AVERAGING) and not across_norms:
            kind = type(item.owner).__name__
            return f"{kind} ({item.name}) averages over its channels; across_norms=True removes them too"
    return None


def _parts(root: nn.Module, item: _Item) -> Iterator[TensorPart]:
    owner, name, pairs = item.owner, item.name, item.pairs
    if isinstance(owner, _Raw):
        shape = root.get_parameter(name).shape
        # zeros there hide the channels too, whether it is multiplied, added, or the weight of a product
        yield TensorPart(name, item.dim % len(shape), pairs, reads=True)
        return
    tensors = {leaf: t for leaf in _LEAVES if isinstance(t := getattr(owner, leaf, None), Tensor)}
    full = {leaf: f"{name}.{leaf}".lstrip(".") for leaf in tensors}
    if isinstance(owner, _ConvNd):
        depthwise = owner.groups > 1 and owner.groups == owner.in_channels == owner.out_channels
        transposed = isinstance(owner, _ConvTransposeNd)
        if depthwise or item.reads is transposed:  # what it makes, or for a transposed one what it reads, is dim 0
            yield TensorPart(full["weight"], 0, pairs, item.reads and not depthwise)
        else:
            inner = owner.weight.shape[1]
            yield TensorPart(full["weight"], 1, tuple((i % inner, channel) for i, channel in pairs), item.reads)
        if "bias" in full and (depthwise or not item.reads):
            yield TensorPart(full["bias"], 0, pairs)
    elif isinstance(owner, nn.Linear):
        yield TensorPart(full["weight"], 1 if item.reads else 0, pairs, item.reads)
        if "bias" in full and not item.reads:
            yield TensorPart(full["bias"], 0, pairs)
    elif isinstance(owner, nn.Embedding):
        yield TensorPart(full["weight"], 1, pairs)
    elif isinstance(owner, nn.PReLU):
        if owner.num_parameters > 1:
            yield TensorPart(full["weight"], 0, pairs)
    else:  # a norm
        if not full:
            raise _NoPartError(f"{type(owner).__name__} ({name}) has no weight whose size would tell its own")
        for leaf, tensor in tensors.items():
            yield TensorPart(full[leaf], tensor.ndim - 1, pairs)


_LEAVES = ("weight", "bias", "running_mean", "running_var")


def _ties(item: _Item) -> list[tuple[int, ...]]:
    """Sets of channels with the same place in each block of a layer whose blocks must stay of one size."""
    owner = item.owner
    blocks = 1
    if isinstance(owner, _ConvNd) and not owner.groups == owner.in_channels == owner.out_channels:
        blocks, width = owner.groups, owner.in_channels if item.reads else owner.out_channels
    elif isinstance(owner, nn.GroupNorm):
        blocks, width = owner.num_groups, owner.num_channels
    if blocks == 1:
        return []
    places: dict[int, set[int]] = {}
    for index, channel in item.pairs:
        places.setdefault(index % (width // blocks), set()).add(channel)
    return [tuple(channels) for channels in places.values()]


def _sharing(parts: Sequence[TensorPart]) -> list[tuple[int, ...]]:
    places: dict[tuple[str, int, int], set[int]] = {}
    for part in parts:
        for index, channel in part.pairs:
            places.setdefault((part.tensor, part.dim, index), set()).add(channel)
    return [tuple(channels) for channels in places.values() if len(channels) > 1]


def _joined(channels: int, ties: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    leader = list(range(channels))

    def find(channel: int) -> int:
        while leader[channel] != channel:
            channel = leader[channel]
        return channel

    for first, *others in ties:
        for other in others:
            low, high = sorted((find(first), find(other)))
            leader[high] = low
    sets: dict[int, list[int]] = {}
    for channel in range(channels):
        sets.setdefault(find(channel), []).append(channel)
    return tuple(tuple(members) for members in sets.values())


def _head_groups(root: nn.Module, skip: Collection[str]) -> Iterator[ChannelGroup]:
    for name, attention in attention_layouts(root).items():
        prefix = f"{name}." if name else ""
        if matches(name, skip):
            continue
        rows = tuple((row, head) for head in range(attention.heads) for row in attention.rows(head))
        columns = tuple((column, head) for head in range(attention.heads) for column in attention.columns(head))
        parts = [TensorPart(f"{prefix}{attention.output}.weight", 1, columns, reads=True)]
        for layer in attention.inputs:
            linear = root.get_submodule(f"{prefix}{layer}")
            parts.append(TensorPart(f"{prefix}{layer}.weight", 0, rows))
            if linear.bias is not None:
                parts.append(TensorPart(f"{prefix}{layer}.bias", 0, rows))
        single = tuple((head,) for head in range(attention.heads))
        yield ChannelGroup(name, "heads", attention.heads, tuple(parts), single, exact=True)


def _first_names(root: nn.Module) -> dict[str, str]:
    """For each name of a tensor the first of its names; a shared weight has several."""
    first: dict[int, str] = {}
    names = {}
    for name, tensor in named_tensors(root).items():
        names[name] = first.setdefault(id(tensor), name)
    return names


def _without_conflicts(groups: list[ChannelGroup], reasons: dict[str, str]) -> list[ChannelGroup]:
    """The groups that have their indices for themselves."""
    owners: dict[tuple[str, int, int], set[int]] = {}
    for number, group in enumerate(groups):
        for part in group.parts:
            for index, _ in part.pairs:
                owners.setdefault((part.tensor, part.dim, index), set()).add(number)
    shared = {number for numbers in owners.values() if len(numbers) > 1 for number in numbers}
    for number in shared:
        reasons[groups[number].name] = "its channels share weights with those of another layer"
    return [group for number, group in enumerate(groups) if number not in shared]

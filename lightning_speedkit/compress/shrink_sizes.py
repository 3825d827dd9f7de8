"""The sizes of a network's tensors: cuts channels out of them, and lets its layers' own numbers follow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.optim import Optimizer

from lightning_speedkit.compress.shrink_heads import attention_layouts, fit_heads

__all__ = [
    "Cuts",
    "cut",
    "cut_tensor",
    "forget_gradient_sink",
    "named_tensors",
    "set_sizes",
    "set_tensors",
    "tensor_sizes",
]

Cuts = Mapping[str, Mapping[int, Sequence[int]]]
"""For each tensor by name, for each of its dimensions that shrinks, the indices that stay, in order."""


def named_tensors(root: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer of ``root``; one that has several names is there under each.

    >>> layer = nn.Linear(2, 1)
    >>> list(named_tensors(nn.Sequential(layer, layer)))
    ['0.weight', '0.bias', '1.weight', '1.bias']
    """
    return {**dict(root.named_parameters(remove_duplicate=False)), **dict(root.named_buffers(remove_duplicate=False))}


def tensor_sizes(root: nn.Module) -> dict[str, list[int]]:
    """The shape of every parameter and buffer as a plain list."""
    return {name: list(tensor.shape) for name, tensor in named_tensors(root).items()}


def cut_tensor(tensor: Tensor, keep: Mapping[int, Sequence[int]]) -> Tensor:
    """A new tensor with only the indices that ``keep`` has for a dimension; other dimensions stay whole.

    >>> cut_tensor(torch.arange(6).view(2, 3), {1: [0, 2]})
    tensor([[0, 2],
            [3, 5]])
    """
    kept = tensor.detach()
    for dim, indices in keep.items():
        kept = kept.index_select(dim, torch.tensor(list(indices), dtype=torch.long, device=tensor.device))
    last = torch.channels_last if tensor.ndim == 4 else torch.channels_last_3d
    if tensor.ndim in (4, 5) and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=last):
        return kept.contiguous(memory_format=last)
    return kept.clone() if kept is tensor or not keep else kept.contiguous()


def cut(root: nn.Module, cuts: Cuts, optimizers: Iterable[Optimizer] = ()) -> None:
    """Cuts ``root`` in place. Parameters stay the same objects, so optimizers and schedulers go on with them.

    What an optimizer keeps for a parameter in its shape (Adam's moments, a momentum buffer) is cut at the same indices,
    as are row and column factors that have length one in the other dimensions. A gradient is cut too.
    """
    tensors = named_tensors(root)
    keep = {id(tensors[name]): dict(dims) for name, dims in cuts.items()}
    for optimizer in optimizers:
        _cut_state(optimizer, keep)
    new = {name: cut_tensor(tensors[name], dims) for name, dims in cuts.items()}
    gradients = {
        name: cut_tensor(gradient, keep[id(tensors[name])])
        for name in cuts
        if (gradient := tensors[name].grad) is not None
    }
    set_tensors(root, new)
    for name, gradient in gradients.items():
        tensors[name].grad = gradient


def set_tensors(root: nn.Module, new: Mapping[str, Tensor]) -> None:
    """Gives the parameters and buffers of these names these values, of whatever size; gradients are dropped.

    The objects stay the same. The numbers that layers keep of their sizes, such as ``out_channels``, follow.
    """
    layouts = attention_layouts(root)
    tensors = named_tensors(root)
    for name, value in new.items():
        tensor = tensors[name]
        tensor.grad = None
        forget_gradient_sink(tensor)
        tensor.data = value
    touched = {name.rpartition(".")[0] for name in new}
    for name, module in root.named_modules(remove_duplicate=False):
        if name in touched:
            _fit_numbers(module)
    fit_heads(root, layouts)


def forget_gradient_sink(tensor: Tensor) -> None:
    """Lets autograd make anew what adds to the gradient of ``tensor``: it knows the old size and has DDP's hooks."""
    if tensor.is_leaf and tensor.requires_grad:
        value, gradient = tensor.data, tensor.grad
        tensor.grad = None
        other = torch.float32 if tensor.dtype == torch.float64 else torch.float64
        tensor.data = torch.empty(0, dtype=other, device=tensor.device)  # another dtype is what makes it forget
        tensor.data = value
        tensor.grad = gradient


def set_sizes(root: nn.Module, sizes: Mapping[str, Sequence[int]]) -> None:
    """Gives the tensors of these names these shapes, with zeros for values: they are to be loaded afterwards."""
    tensors = named_tensors(root)
    wanted = {name: size for name, size in sizes.items() if list(tensors[name].shape) != list(size)}
    set_tensors(root, {name: tensors[name].detach().new_zeros(tuple(size)) for name, size in wanted.items()})


def _fit_numbers(module: nn.Module) -> None:
    weight = getattr(module, "weight", None)
    size = tuple(weight.shape) if isinstance(weight, Tensor) else ()
    if isinstance(module, _ConvNd):
        if module.groups > 1 and module.groups == module.in_channels == module.out_channels:  # depthwise
            module.groups = module.in_channels = module.out_channels = size[0]
        elif isinstance(module, _ConvTransposeNd):
            module.in_channels, module.out_channels = size[0], size[1] * module.groups
        else:
            module.out_channels, module.in_channels = size[0], size[1] * module.groups
    elif isinstance(module, nn.Linear):
        module.out_features, module.in_features = size
    elif isinstance(module, _NormBase):
        mean = module.running_mean
        module.num_features = size[0] if size else len(mean) if mean is not None else module.num_features
    elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and size:
        module.normalized_shape = size
    elif isinstance(module, nn.GroupNorm) and size:
        module.num_channels = size[0]
    elif isinstance(module, nn.Embedding):
        module.num_embeddings, module.embedding_dim = size
    elif isinstance(module, nn.PReLU):
        module.num_parameters = size[0]


def _cut_state(optimizer: Optimizer, keep: Mapping[int, Mapping[int, Sequence[int]]]) -> None:
    lost = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in keep or not optimizer.state.get(parameter):
                continue
            state = _cut_values(optimizer.state[parameter], tuple(parameter.shape), keep[id(parameter)])
            if state is None:
                del optimizer.state[parameter]
                lost += 1
            else:
                optimizer.state[parameter].update(state)
    if lost:
        rank_zero_warn(
            f"{type(optimizer).__name__} keeps state that has not the shape of its parameter, so it cannot follow the "
            f"channels that were removed: the state of {lost} parameters starts anew."
        )


def _cut_values(
    state: Mapping[str, Any], shape: tuple[int, ...], keep: Mapping[int, Sequence[int]]
) -> dict[str, Any] | None:
    """The state with its tensors cut, or ``None`` if one of them cannot be."""
    new = dict(state)
    for key, value in state.items():
        if not isinstance(value, Tensor) or (value.numel() == 1 and shape != tuple(value.shape)):
            continue
        same = value.ndim == len(shape) and all(a in (b, 1) for a, b in zip(value.shape, shape, strict=True))
        if not same or type(value) not in (Tensor, nn.Parameter):
            return None
        # a factor has length one in the dimensions that it was averaged over
        new[key] = cut_tensor(value, {dim: indices for dim, indices in keep.items() if value.shape[dim] == shape[dim]})
    return new

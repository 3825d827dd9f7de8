"""The order in which images and convolution weights lie in memory: set, put back, and watched.

Channels-last (NHWC) keeps the channels of a pixel together. Shapes, names and values do not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

__all__ = [
    "can_use_channels_last",
    "convert_images",
    "find_format_breaks",
    "holds_convolutions",
    "to_channels_last_",
    "to_plain_format_",
    "watch_formats",
]

_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


def to_channels_last_(model: nn.Module) -> tuple[str, ...]:
    """Lays out the weights of 2-d convolutions channels-last, in place, and returns the paths of those it changed.

    The parameters stay the same objects. Lazy layers without weights yet are left out.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 2))
    >>> to_channels_last_(model), model[0].weight.stride()
    (('0',), (27, 1, 9, 3))
    >>> to_plain_format_(model, ("0",))
    >>> model[0].weight.stride()
    (27, 9, 3, 1)
    """
    changed = []
    for path, module in model.named_modules():
        if isinstance(module, _CONVOLUTIONS) and _has_plain_weight(module):
            module.weight.data = module.weight.data.to(memory_format=torch.channels_last)
            changed.append(path)
    return tuple(changed)


def to_plain_format_(model: nn.Module, paths: tuple[str, ...]) -> None:
    """Lays out the weights at these paths in the plain order again, in place, and their gradients.

    A path at which there is no such layer any more, because it was replaced, is passed over.
    """
    found = dict(model.named_modules(remove_duplicate=False))
    for path in paths:
        weight = getattr(found.get(path), "weight", None)
        if isinstance(weight, nn.Parameter):
            weight.data = weight.data.contiguous()
            if weight.grad is not None:
                weight.grad = weight.grad.contiguous()


def find_format_breaks(model: nn.Module, call: Callable[[], object]) -> tuple[str, ...]:
    """The paths of layers that were given channels-last images while ``call`` ran, and gave plain ones back.

    >>> class Back(nn.Module):
    ...     def forward(self, x):
    ...         return x.contiguous()
    >>> model = nn.Sequential(nn.ReLU(), Back())
    >>> find_format_breaks(model, lambda: model(torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)))
    ('1',)
    """
    found: list[str] = []
    handles = watch_formats(model, found)
    try:
        call()
    finally:
        for handle in handles:
            handle.remove()
    return tuple(dict.fromkeys(found))


def watch_formats(model: nn.Module, found: list[str]) -> list[RemovableHandle]:
    """Hooks that add to ``found`` the paths of layers that are given channels-last images and give plain ones back."""

    def look_at(path: str) -> Callable[..., None]:
        def look(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if any(map(_is_channels_last, _images((args, kwargs)))) and any(map(_is_plain, _images(output))):
                found.append(path)

        return look

    return [
        module.register_forward_hook(look_at(path), with_kwargs=True)
        for path, module in model.named_modules()
        if next(module.children(), None) is None
    ]


def _has_plain_weight(module: nn.Module) -> bool:
    weight = module.weight
    # a weight that is computed anew at each call (weight norm, pruning) would not keep its layout
    if not isinstance(weight, nn.Parameter) or nn.parameter.is_lazy(weight):
        return False
    return not weight.is_contiguous(memory_format=torch.channels_last) and weight.is_contiguous()


def _images(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if _is_image(value)]


def _is_channels_last(image: Tensor) -> bool:
    # with one channel, or one pixel, both orders are the same
    return image.is_contiguous(memory_format=torch.channels_last) and not image.is_contiguous()


def _is_plain(image: Tensor) -> bool:
    return image.is_contiguous() and not image.is_contiguous(memory_format=torch.channels_last)


def convert_images(_: nn.Module, args: Any, kwargs: Any) -> Any:
    """A forward pre-hook, with keywords, that gives a module its images channels-last."""
    return tree_map_only(Tensor, lambda value: _converted(value) if _is_image(value) else value, (args, kwargs))


def _converted(image: Tensor) -> Tensor:
    return image.contiguous(memory_format=torch.channels_last)


def _is_image(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 4 and value.is_floating_point()


def holds_convolutions(module: nn.Module, channels: int = 0) -> bool:
    """Whether a 2-d convolution is in it, of so many input channels at least."""
    return any(isinstance(part, _CONVOLUTIONS) and part.in_channels >= channels for part in module.modules())


def can_use_channels_last(model: nn.Module) -> bool:
    """Whether a 2-d convolution in it has weights of its own that lie channels-last, and more than one channel.

    >>> model = nn.Conv2d(3, 8, 3)
    >>> can_use_channels_last(model), to_channels_last_(model), can_use_channels_last(model)
    (False, ('',), True)
    """
    return any(map(_is_ready, model.modules()))


def _is_ready(module: nn.Module) -> bool:
    # with one channel, or a kernel of 1 x 1, both orders are the same; images of one channel have no order either
    if not isinstance(module, _CONVOLUTIONS) or module.in_channels < 2:
        return False
    weight = module.weight
    is_own = isinstance(weight, nn.Parameter) and not nn.parameter.is_lazy(weight)
    return is_own and weight.is_contiguous(memory_format=torch.channels_last)

"""Networks of timm and torchvision by name, with random weights, for images of any number of channels and classes."""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from lightning_speedkit.errors import MissingExtraError, nearest_names

__all__ = ["FAMILIES", "build_backbone", "checked_names", "checked_task", "published_accuracies"]

FAMILIES = {  # measured in this order, the most costly one last
    "resnet": ("torchvision:resnet18",),
    "mobilenet": (
        "timm:mobilenetv3_small_050",
        "torchvision:mobilenet_v3_small",
        "torchvision:mobilenet_v3_large",
        "torchvision:mobilenet_v2",
    ),
    "vit": ("timm:vit_tiny_patch16_224",),
    "regnet": ("timm:regnety_002", "torchvision:regnet_y_400mf"),
    "efficientnet": ("timm:efficientnet_lite0", "torchvision:efficientnet_b0"),
    "convnext": ("timm:convnext_atto", "torchvision:convnext_tiny"),
}
_LIBRARIES = ("timm", "torchvision")
_NO_CLASSIFIERS = ("detection", "segmentation", "optical_flow", "video", "quantization")


def build_backbone(name: str, task_shape: Sequence[int] = (3, 224, 224), num_classes: int = 1000) -> nn.Module:
    """A new network with random weights from images to ``num_classes`` logits. Nothing is downloaded.

    A network of torchvision takes three channels only: for another number its first convolution is made anew, as torch
    initializes one. A Vision Transformer is made for the given height and width.

    Args:
        name: ``"timm:..."`` or ``"torchvision:..."``, a classifier that the library has under that name. Your own one
            is found too, once it is registered by ``timm.models.register_model`` or
            ``torchvision.models.register_model``.
        task_shape: Channels, height and width of an image.
        num_classes: How many logits.

    Raises:
        ValueError: The library has no such network (the message has the nearest names), or a number is not a whole one
            from 1.
        MissingExtraError: The library is not installed.

    >>> net = build_backbone("torchvision:mobilenet_v3_small", (1, 32, 32), num_classes=10)
    >>> net.features[0][0].in_channels, net.classifier[-1].out_features
    (1, 10)
    """
    (channels, height, width), num_classes = checked_task(task_shape, num_classes)
    (name,) = checked_names([name])
    library, _, model = name.partition(":")
    with _quiet():
        if library == "timm":
            return _from_timm(model, (channels, height, width), num_classes)
        return _from_torchvision(model, (channels, height, width), num_classes)


def _from_timm(model: str, shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    import timm

    told: Any = timm.models.get_pretrained_cfg(model)
    size: dict[str, Any] = {"img_size": shape[1:]} if told is not None and told.fixed_input_size else {}
    made: nn.Module = timm.create_model(model, pretrained=False, in_chans=shape[0], num_classes=num_classes, **size)
    return made


def _from_torchvision(model: str, shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    from torchvision.models import get_model

    size: dict[str, Any] = {}
    if model.startswith("vit_"):
        if shape[1] != shape[2]:
            raise ValueError(f"torchvision:{model} takes square images only, got {shape[1]}x{shape[2]}.")
        size["image_size"] = shape[1]
    made: nn.Module = get_model(model, weights=None, num_classes=num_classes, **size)
    _take_channels(made, shape[0])
    return made


def _take_channels(model: nn.Module, channels: int) -> None:
    """Make the first convolution anew if it is for another number of channels."""
    found: tuple[str, Any] | None = next(((p, m) for p, m in model.named_modules() if type(m) is nn.Conv2d), None)
    if found is None or found[1].in_channels == channels:
        return
    path, old = found
    if old.groups != 1:
        raise ValueError(f"its first convolution {path!r} takes {old.in_channels} channels in groups, not {channels}")
    new = nn.Conv2d(
        channels,
        old.out_channels,
        old.kernel_size,
        stride=old.stride,
        padding=old.padding,
        dilation=old.dilation,
        bias=old.bias is not None,
        padding_mode=old.padding_mode,
    )
    owner, _, own = path.rpartition(".")
    setattr(model.get_submodule(owner), own, new)


def checked_task(task_shape: Sequence[int], num_classes: int) -> tuple[tuple[int, int, int], int]:
    """Channels, height and width as a tuple, and the classes, if all are whole numbers from 1.

    >>> checked_task([1, 8, 8], 10)
    ((1, 8, 8), 10)
    """
    given: Any = task_shape
    shape = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else ()
    if len(shape) != 3 or not all(_is_count(size) for size in shape):
        raise ValueError(
            f"task_shape={task_shape!r} must be channels, height and width of one image, such as (3, 64, 64)."
        )
    if not _is_count(num_classes):
        raise ValueError(f"num_classes={num_classes!r} must be a whole number from 1.")
    return (int(shape[0]), int(shape[1]), int(shape[2])), int(num_classes)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def checked_names(candidates: Iterable[str] | None) -> tuple[str, ...]:
    """The names of networks, families replaced by their members; of all families if none are given.

    Those members of a family whose library is not installed are left out, unless none remains.

    >>> checked_names(["resnet", "torchvision:resnet34"])
    ('torchvision:resnet18', 'torchvision:resnet34')
    """
    if candidates is None:
        if not any(map(_is_there, _LIBRARIES)):
            raise MissingExtraError("pick_backbone", extra="arch", library=" or ".join(_LIBRARIES))
        return tuple(name for family in FAMILIES.values() for name in family if _is_there(name.partition(":")[0]))
    if isinstance(candidates, str) or not isinstance(candidates, Iterable):
        raise TypeError(f"candidates={candidates!r} must be a list of names, such as ['torchvision:resnet18'].")
    names: list[str] = []
    for candidate in candidates:
        if not isinstance(candidate, str):
            raise TypeError(f"candidates: {candidate!r} is not a name such as 'torchvision:resnet18'.")
        family = FAMILIES.get(candidate, ())
        there = [name for name in family if _is_there(name.partition(":")[0])]
        names.extend(there or [_checked_name(family[0] if family else candidate)])
    if not names:
        raise ValueError("candidates is empty; name some, such as ['torchvision:resnet18'], or leave it out.")
    return tuple(dict.fromkeys(names))


def _checked_name(name: str) -> str:
    library, colon, model = name.partition(":")
    if not colon or library not in _LIBRARIES:
        raise ValueError(
            f"candidates: {name!r} must be 'timm:...', 'torchvision:...', or one of the families "
            f"{', '.join(FAMILIES)}.{_near(name, _all_known())}"
        )
    if not _is_there(library):
        raise MissingExtraError(name, extra="arch", library=library)
    known = _known(library)
    if model.partition(".")[0] not in known:
        raise ValueError(f"candidates: {library} has no classifier {model!r}.{_near(name, _all_known())}")
    return name


def _all_known() -> list[str]:
    named = [f"{library}:{model}" for library in _LIBRARIES if _is_there(library) for model in _known(library)]
    return [*FAMILIES, *named]


def _known(library: str) -> list[str]:
    with _quiet():
        if library == "timm":
            import timm

            return list(timm.list_models())
        from torchvision import models

        others = (getattr(models, part, None) for part in _NO_CLASSIFIERS)
        left_out = {name for part in others if part is not None for name in models.list_models(module=part)}
        return [name for name in models.list_models() if name not in left_out]


def _near(name: str, known: Sequence[str]) -> str:
    """Did you mean: the same network in a library, or the nearest names."""
    model = name.rpartition(":")[2].lower()
    found = [one for one in reversed(known) if one.rpartition(":")[2] == model]
    found += nearest_names(name, known, most=3, cutoff=0.7)
    by_model = {one.rpartition(":")[2]: one for one in known}
    found += [by_model[near] for near in nearest_names(model, by_model, most=3, cutoff=0.7)]
    found = list(dict.fromkeys(found))[:3]
    return f" Did you mean {' or '.join(map(repr, found))}?" if found else ""


def published_accuracies(names: Iterable[str]) -> dict[str, float]:
    """The ImageNet-1K top-1 accuracies, 0 to 1, that torchvision states for its own weights of these networks.

    They are of other images, at a resolution of their own, after a training of their own: a hint at what a network can
    learn. Networks that torchvision states nothing for, those of timm among them, are left out. Nothing is downloaded.

    >>> published_accuracies(["torchvision:resnet18", "timm:vit_tiny_patch16_224"])
    {'torchvision:resnet18': 0.69758}
    """
    found: dict[str, float] = {}
    for name in names:
        library, _, model = name.partition(":")
        if library != "torchvision":
            continue
        _checked_name(name)
        from torchvision.models import get_model_weights

        with contextlib.suppress(ValueError, KeyError, AttributeError, TypeError), _quiet():
            best: Any = get_model_weights(model).DEFAULT  # a network of the user's own has none
            found[name] = round(float(best.meta["_metrics"]["ImageNet-1K"]["acc@1"]) / 100, 6)
    return found


def _is_there(library: str) -> bool:
    return importlib.util.find_spec(library) is not None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of the libraries about their own insides; they speak to who calls them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield

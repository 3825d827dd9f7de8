"""A float32 copy of a module on the CPU that shares nothing with the original and is ready to be quantized."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize, prune
from torch.utils.data import DataLoader, Dataset

from lightning_speedkit.errors import QuantizationError

__all__ = ["copy_module", "fingerprint", "float_copy", "refuse_lazy", "replace_module"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def float_copy(module: nn.Module) -> nn.Module:
    """A copy of ``module`` in float32, eval mode, on the CPU, without gradients; ``module`` is not changed.

    What is complex becomes complex64. A LightningModule is copied without its Trainer. Compiled modules become plain
    ones, pruning masks and parametrizations become plain weights, and ``padding="same"`` becomes the numbers that it
    stands for. The fused inference path of ``nn.TransformerEncoder`` is off in the copy, because it reads the float
    weights behind the layers' backs (pytorch #32764, #82443). An attribute that cannot be copied (an open file, a
    lock), a data set and a loader are shared with the original.

    >>> model = nn.Linear(2, 1).double()
    >>> twin = float_copy(model)
    >>> twin.weight.dtype, twin.training, model.weight.dtype, model.training
    (torch.float32, False, torch.float64, True)
    """
    with torch.no_grad():  # else the parameters of a scripted module have a history in its copy
        twin = _without_compile(copy_module(module))
    _to_float32(twin)
    twin.eval()
    _make_weights_plain(twin)
    for part in twin.modules():
        if isinstance(part, nn.TransformerEncoder):
            part.use_nested_tensor = False
        elif isinstance(part, nn.TransformerEncoderLayer):
            part.activation_relu_or_gelu = 0  # only the fused path reads it
        elif isinstance(part, _ConvNd) and isinstance(part.padding, str):
            _make_padding_plain(part)
    for parameter in twin.parameters():  # requires_grad_() of a scripted module is not supported
        parameter.requires_grad_(False)
    return twin


def copy_module(module: ModuleT) -> ModuleT:
    """A deep copy that shares data sets and loaders, and whatever cannot be copied, with the original."""
    shared = _shared_attributes(module)
    try:
        return copy.deepcopy(module, dict(shared))
    except Exception:  # whatever the __deepcopy__ or __reduce__ of an attribute raises
        return copy.deepcopy(module, {**shared, **_answers_to_what_cannot_be_copied(module)})


def replace_module(root: nn.Module, name: str, new: nn.Module) -> nn.Module:
    """``root`` with ``new`` in the place of its submodule ``name``, under every name that the old one is known by.

    >>> layer = nn.ReLU()
    >>> replace_module(nn.Sequential(layer, layer), "0", nn.Tanh())
    Sequential(
      (0): Tanh()
      (1): Tanh()
    )
    """
    old = root.get_submodule(name)
    if old is root:
        return new
    for parent in list(root.modules()):
        for key, child in list(parent._modules.items()):  # named_children() leaves out the second name of a module
            if child is old:
                setattr(parent, key, new)
    return root


def fingerprint(module: nn.Module) -> str:
    """A hash of every parameter and buffer, to see that nothing changed them.

    >>> model = nn.Linear(2, 1)
    >>> before = fingerprint(model)
    >>> _ = model.weight.data.add_(1)
    >>> before == fingerprint(model)
    False
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def refuse_lazy(model: nn.Module) -> None:
    """QuantizationError if a layer of ``model`` has no shape, or no values, yet."""
    lazy = [name for name, value in (*model.named_parameters(), *model.named_buffers()) if is_lazy(value)]
    if lazy:
        raise QuantizationError(
            f"{type(model).__name__} has lazy layers without a shape ({', '.join(lazy[:3])}). "
            "Run it once on a batch first."
        )
    if any(value.is_meta for value in (*model.parameters(), *model.buffers())):
        raise QuantizationError(
            f"{type(model).__name__} has weights on the meta device, without values. Load them first."
        )


def _attributes(module: nn.Module) -> Iterator[Any]:
    own = {"_parameters", "_buffers", "_modules", "_trainer", "_fabric"}
    for part in module.modules():
        for name, value in vars(part).items():
            if name not in own and not isinstance(value, nn.Module):
                yield value


def _shared_attributes(module: nn.Module) -> dict[int, Any]:
    return {id(value): value for value in _attributes(module) if isinstance(value, (Dataset, DataLoader))}


def _answers_to_what_cannot_be_copied(module: nn.Module) -> dict[int, Any]:
    answers: dict[int, Any] = {}
    modules = {id(part): part for part in module.modules()}
    for value in _attributes(module):
        if isinstance(value, Tensor) and not value.is_leaf:  # deepcopy refuses a tensor with a history
            answers[id(value)] = value.detach().clone()
            continue
        try:
            copy.deepcopy(value, dict(modules))
        except Exception:
            answers[id(value)] = value
    return answers


def _without_compile(root: nn.Module) -> nn.Module:
    compiled = torch._dynamo.eval_frame.OptimizedModule if hasattr(torch, "_dynamo") else ()
    while isinstance(root, compiled):
        root = root._orig_mod
    for parent in list(root.modules()):
        parent._compiled_call_impl = None
        for key, child in list(parent._modules.items()):
            while isinstance(child, compiled):
                child = child._orig_mod
                setattr(parent, key, child)
    return root


def _to_float32(root: nn.Module) -> None:
    stores: list[Any] = [store for part in root.modules() for store in (part._parameters, part._buffers)]
    kept = [(s, key, value) for s in stores for key, value in s.items() if value is not None and value.is_complex()]
    for store, key, _ in kept:  # Module.to(float32) would drop their imaginary part
        store[key] = None
    with torch.no_grad():
        root.to("cpu", torch.float32)
        made: dict[int, Tensor] = {}
        for store, key, value in kept:
            if id(value) not in made:
                moved = value.detach().to("cpu", torch.complex64)
                made[id(value)] = nn.Parameter(moved) if isinstance(value, nn.Parameter) else moved
            store[key] = made[id(value)]


def _make_weights_plain(root: nn.Module) -> None:
    for part in list(root.modules()):
        if parametrize.is_parametrized(part):
            _own_class(part)
            for name in list(cast("nn.ModuleDict", part.parametrizations)):
                parametrize.remove_parametrizations(part, name)
        for hook in list(part._forward_pre_hooks.values()):
            if isinstance(hook, prune.BasePruningMethod):
                prune.remove(part, hook._tensor_name)  # type: ignore[no-untyped-call]


def _make_padding_plain(part: _ConvNd) -> None:
    total = [
        0 if part.padding == "valid" else step * (size - 1)
        for step, size in zip(part.dilation, part.kernel_size, strict=True)
    ]
    if all(count % 2 == 0 for count in total):  # else one side has one more, which no number says
        part.padding = tuple(count // 2 for count in total)


def _own_class(part: nn.Module) -> None:
    # a parametrized module and its copies share a class made for them, and removing works on that class
    cls = type(part)
    namespace = {key: value for key, value in vars(cls).items() if key not in ("__dict__", "__weakref__")}
    part.__class__ = type(cls.__name__, cls.__bases__, namespace)

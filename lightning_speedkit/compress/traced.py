"""Runs a module by its torch.fx graph without ceasing to be that module.

``prepare_fx`` and ``convert_fx`` return a GraphModule: another class, with only the traced forward. Here the graph's
forward and its int8 layers go back into the module, whose class becomes a subclass of its own class. So the
methods, attributes, keyword arguments and ``isinstance`` of the float model still hold, also for a LightningModule.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from typing_extensions import override

from lightning_speedkit.compress.call_difference import refusal_of_call
from lightning_speedkit.compress.float_copy import replace_module
from lightning_speedkit.compress.torch_ao import observe_static
from lightning_speedkit.errors import QuantizationError

__all__ = ["observe_forward", "run_by_graph", "signature_template"]

_TENSOR = "<tensor>"
_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size)


def signature_template(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of one forward by name, each tensor replaced by a mark: plain Python that can be saved.

    QuantizationError if an argument is anything else: it could not be saved, or not be compared.

    >>> signature_template(nn.Bilinear(1, 1, 1), (torch.ones(1, 1),), {"input2": torch.ones(1, 1)})
    {'input1': '<tensor>', 'input2': '<tensor>'}
    """
    template = _flatten(type(module).forward, module, args, kwargs)[0]
    for name, value in template.items():
        if not _is_plain(value):
            raise QuantizationError(f"its argument {name!r} is neither a tensor nor plain Python, but {value!r:.100}")
    return template


def observe_forward(
    module: nn.Module, template: Mapping[str, Any], *, engine: str, skip: Sequence[str] = ()
) -> torch.fx.GraphModule:
    """Trace ``module.forward`` and put observers into it; ``module`` is used up.

    Only tensors become inputs of the graph. Every other argument, also one that was left at its default, is fixed at
    its value in ``template``: torch.fx would trace it as a value that is never ``None`` and never false.
    """
    original = type(module).forward
    parameters = list(inspect.signature(original).parameters)

    def forward(self: nn.Module, inputs: list[Tensor]) -> Any:
        count = iter(range(len(_marks(template))))
        values = apply_to_collection(dict(template), str, lambda text: inputs[next(count)] if text == _TENSOR else text)
        bound = inspect.signature(original).bind_partial()
        bound.arguments.update({parameters[0]: self, **values})
        return original(*bound.args, **bound.kwargs)

    cls = type(module)
    module.__class__ = type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})
    return observe_static(module, engine=engine, skip=skip)


def run_by_graph(
    module: nn.Module, graph: torch.fx.GraphModule, template: Mapping[str, Any], *, fused: Sequence[str] = ()
) -> None:
    """Make ``module`` run ``graph``, which was made from a copy of it, with the arguments of ``template``.

    ``fused`` names the layers, such as a BatchNorm after a convolution, that live on inside another one.
    """
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_module"]
    for target in dict.fromkeys(called):
        _put(module, target, graph.get_submodule(target))
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            _put_tensor(module, graph, str(node.target))
    for name in fused:
        replace_module(module, name, nn.Identity())
    cls, run = type(module), type(graph).forward
    original = cls.forward
    every = inspect.signature(original).parameters.values()
    spread = [parameter.name for parameter in every if parameter.kind is inspect.Parameter.VAR_KEYWORD]

    class Quantized(cls):  # type: ignore[misc, valid-type]
        @override
        @functools.wraps(original)
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            found, tensors = _flatten(original, self, args, kwargs)
            if found != template:
                raise ValueError(refusal_of_call(cls.__name__, template, found, spread=spread))
            return run(self, tensors)

    Quantized.__name__ = Quantized.__qualname__ = f"Quantized{cls.__name__}"
    Quantized.__module__, Quantized.__doc__ = cls.__module__, cls.__doc__
    module.__class__ = Quantized


def _flatten(
    forward: Any, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Tensor]]:
    bound = inspect.signature(forward).bind(module, *args, **kwargs)
    bound.apply_defaults()
    values = dict(list(bound.arguments.items())[1:])
    tensors: list[Tensor] = []

    def mark(tensor: Tensor) -> str:
        tensors.append(tensor)
        return _TENSOR

    return cast("dict[str, Any]", apply_to_collection(values, Tensor, mark, allow_frozen=True)), tensors


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(_is_plain(part) for pair in value.items() for part in pair)
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN


def _marks(template: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    apply_to_collection(dict(template), str, lambda text: found.append(text) if text == _TENSOR else None)
    return found


def _put(root: nn.Module, target: str, new: nn.Module) -> None:
    try:
        root.get_submodule(target)
    except AttributeError:
        parent, _, key = target.rpartition(".")
        setattr(root.get_submodule(parent), key, new)
    else:
        replace_module(root, target, new)


def _put_tensor(root: nn.Module, graph: nn.Module, target: str) -> None:
    prefix, _, key = target.rpartition(".")
    value = getattr(graph.get_submodule(prefix), key)
    owner = root.get_submodule(prefix)
    known = {name for name, _ in (*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False))}
    if isinstance(value, nn.Module) or key in known:
        return
    if not isinstance(value, Tensor):
        raise QuantizationError(f"Its graph reads {target!r}, a {type(value).__name__}, which cannot be saved.")
    owner.register_buffer(key, value)

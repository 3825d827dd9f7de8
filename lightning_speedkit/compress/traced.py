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

from lightning_speedkit.compress.float_copy import replace_module
from lightning_speedkit.compress.torch_ao import observe_static

__all__ = ["observe_forward", "run_by_graph", "signature_template"]

_TENSOR = "<tensor>"


def signature_template(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of one forward by name, each tensor replaced by a mark: plain Python that can be saved.

    >>> signature_template(nn.Bilinear(1, 1, 1), (torch.ones(1, 1),), {"input2": torch.ones(1, 1)})
    {'input1': '<tensor>', 'input2': '<tensor>'}
    """
    return _flatten(type(module).forward, module, args, kwargs)[0]


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

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found, tensors = _flatten(original, self, args, kwargs)
        if found != template:
            raise ValueError(
                f"The int8 forward of {cls.__name__} was traced for the arguments {dict(template)} and cannot "
                f"answer {found}. Call it as on the calibration batches, or quantize with backend='dynamic'."
            )
        return run(self, tensors)

    namespace = {"forward": forward, "__module__": cls.__module__, "__doc__": cls.__doc__}
    module.__class__ = type(f"Quantized{cls.__name__}", (cls,), namespace)


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

    return cast("dict[str, Any]", apply_to_collection(values, Tensor, mark)), tensors


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
    if isinstance(value, Tensor):
        owner.register_buffer(key, value)
    else:
        setattr(owner, key, value)

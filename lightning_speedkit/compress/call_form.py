"""How a network is called and what it answers with, apart from the tensors: plain data that a file can hold.

A graph of ONNX has flat lists of tensors for its inputs and outputs. The form says which argument each input is and
where each output goes, so that what runs the graph is called like the network that it was made from.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_speedkit.compress.call_difference import TENSOR, difference, refusal_of_call, same, tensor_names
from lightning_speedkit.errors import QuantizationError

__all__ = ["CallForm", "form_of", "tensors_of"]

_PLAIN = (type(None), bool, int, float, str)
_KINDS = {kind.name: kind for kind in (
    inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD,
)}  # fmt: skip


@dataclass(frozen=True, slots=True)
class CallForm:
    """The parameters of a forward, its arguments and its answer with each tensor replaced by a mark.

    >>> import torch
    >>> form = form_of(nn.Bilinear(1, 1, 2), (torch.ones(3, 1),), {"input2": torch.ones(3, 1)}, torch.ones(3, 2))
    >>> [tuple(t.shape) for t in form.tensors((torch.ones(5, 1), torch.ones(5, 1)), {})]
    [(5, 1), (5, 1)]
    >>> CallForm.from_plain(form.to_plain()) == form
    True
    """

    name: str
    parameters: tuple[tuple[str, str, Any, bool], ...]  # name, kind, default, whether it has one
    arguments: Mapping[str, Any]
    answer: Any

    @property
    def count(self) -> int:
        """How many tensors one call has."""
        return len(self.names)

    @property
    def names(self) -> list[str]:
        """How a caller names each of these tensors, in the order of the inputs: ``x``, ``batch['mask']``."""
        return tensor_names(self.arguments, spread=self._spread)

    def tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors among the arguments of one call, in the order of the inputs; ValueError if they have no place."""
        found, tensors = self._bound(args, kwargs)
        if not same(found, self.arguments):
            raise ValueError(refusal_of_call(self.name, self.arguments, found, spread=self._spread))
        return tensors

    def difference(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """What is otherwise in another call, in words; empty if it has this form."""
        found, _ = self._bound(args, kwargs)
        return "" if same(found, self.arguments) else difference(self.arguments, found, spread=self._spread)

    @property
    def _spread(self) -> tuple[str, ...]:
        return tuple(name for name, kind, _, _ in self.parameters if kind == "VAR_KEYWORD")

    def _bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], list[Tensor]]:
        bound = inspect.Signature(
            [inspect.Parameter(n, _KINDS[kind], default=d) if has else inspect.Parameter(n, _KINDS[kind])
             for n, kind, d, has in self.parameters]
        ).bind(*args, **kwargs)  # fmt: skip
        bound.apply_defaults()
        found, tensors = _marked(dict(bound.arguments))
        return found, tensors

    def filled(self, arguments: Iterable[Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments that hold ``arguments``."""
        values = _filled(self.arguments, iter(arguments))
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for name, kind, _, _ in self.parameters:
            value = values[name]
            if kind == "VAR_POSITIONAL":
                args.extend(value)
            elif kind == "VAR_KEYWORD":
                kwargs.update(value)
            elif kind == "KEYWORD_ONLY":
                kwargs[name] = value
            else:
                args.append(value)
        return args, kwargs

    def answered(self, outputs: Iterable[Tensor]) -> Any:
        """``outputs`` in the structure that the network answers with."""
        return next(iter(outputs)) if self.answer == TENSOR else _filled(self.answer, iter(outputs))

    def to_plain(self) -> dict[str, Any]:
        """Lists, dicts, numbers and strings; a container of another kind becomes the nearest of ``dict`` and tuple."""
        return {
            "name": self.name,
            "parameters": [[n, kind, _encoded(d), has] for n, kind, d, has in self.parameters],
            "arguments": _encoded(dict(self.arguments)),
            "answer": _encoded(self.answer),
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> CallForm:
        """What :meth:`to_plain` wrote; KeyError, TypeError or ValueError if it is something else."""
        parameters = tuple((str(n), str(kind), _decoded(d), bool(has)) for n, kind, d, has in plain["parameters"])
        arguments = _decoded(plain["arguments"])
        unknown = [name for name in arguments if name not in [n for n, *_ in parameters]]
        unknown += [kind for _, kind, _, _ in parameters if kind not in _KINDS]
        if unknown:
            raise ValueError(f"there is no parameter, or no kind of one, {unknown[0]!r}")
        return cls(str(plain["name"]), parameters, arguments, _decoded(plain["answer"]))


def form_of(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], answer: Any) -> CallForm:
    """The form of one call of ``module`` that was answered with ``answer``.

    QuantizationError if an argument is neither a tensor nor plain Python.
    """
    signature = inspect.signature(module.forward)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    arguments, tensors = _marked(dict(bound.arguments))
    for name, value in arguments.items():
        if not _is_plain(value):
            raise QuantizationError(f"its argument {name!r} is neither a tensor nor plain Python, but {value!r:.100}")
    if not tensors:
        raise QuantizationError("it is called without a tensor")
    parameters = tuple(
        (p.name, p.kind.name, p.default if _is_plain(p.default) else None, p.default is not inspect.Parameter.empty)
        for p in signature.parameters.values()
    )
    return CallForm(type(module).__name__, parameters, arguments, _marked(answer)[0])


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in ``value``, in the order in which an answer lists them.

    >>> import torch
    >>> tensors_of({"a": torch.tensor(1), "b": [torch.tensor(2), None]})
    [tensor(1), tensor(2)]
    """
    return _marked(value)[1]


def _marked(value: Any) -> tuple[Any, list[Tensor]]:
    tensors: list[Tensor] = []

    def mark(tensor: Tensor) -> str:
        tensors.append(tensor)
        return TENSOR

    return apply_to_collection(value, Tensor, mark, allow_frozen=True), tensors


def _filled(value: Any, tensors: Iterator[Tensor]) -> Any:
    return apply_to_collection(
        copy.deepcopy(value), str, lambda text: next(tensors) if text == TENSOR else text, allow_frozen=True
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(type(key) in _PLAIN and _is_plain(part) for key, part in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN


def _encoded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {"dict": [[key, _encoded(part)] for key, part in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"list" if isinstance(value, list) else "tuple": [_encoded(part) for part in value]}
    return value if type(value) in _PLAIN else None


def _decoded(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, parts),) = value.items()
    if kind == "dict":
        return {key: _decoded(part) for key, part in parts}
    return [_decoded(part) for part in parts] if kind == "list" else tuple(_decoded(part) for part in parts)

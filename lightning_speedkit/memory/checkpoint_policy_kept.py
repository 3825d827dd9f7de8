"""Outputs of chosen operations, kept from a forward to its recomputation, which takes them instead of computing them.

They are caught below autograd, by a dispatch mode: the recomputation records the same graph, and only the kernels of
those operations do not run. ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` does the same; this one
differs where exactness asks for it, and does less work per operation.

- A kept operation that draws random numbers (fused attention with dropout) leaves the generator where it left it in
  the forward. Otherwise every dropout after it would draw other numbers in the recomputation.
- The zeros and ones that dropout draws on a CPU can be kept too, as one bit each: drawing them is nearly half of the
  forward of a transformer there.
- An output that has been overwritten since (``ReLU(inplace=True)``), or that a backward has used up, is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from typing_extensions import override

__all__ = ["KeptOutputs"]

_BERNOULLI = torch.ops.aten.bernoulli_.float


class KeptOutputs:
    """Of one forward: the outputs of the operations in ``operations``, in the order in which they ran.

    With ``bits=True`` also what ``bernoulli_`` draws on a CPU, as bits.

    >>> kept = KeptOutputs(frozenset({torch.ops.aten.mm.default}))
    >>> a = torch.ones(2, 2)
    >>> with kept.recording():
    ...     first = a @ a
    >>> with kept.replaying():
    ...     second = a @ a
    >>> second.data_ptr() == first.data_ptr()
    True
    """

    def __init__(self, operations: frozenset[Any], bits: bool = False) -> None:
        self._operations = operations | {_BERNOULLI} if bits else operations
        self._kept: list[_Output | _Bits | None] = []

    def recording(self) -> AbstractContextManager[Any]:
        """Around the forward: keeps."""
        return _Mode(self._operations, self._record)

    def replaying(self) -> AbstractContextManager[Any]:
        """Around the recomputation: gives back, and lets go of what it has given."""
        return _Mode(self._operations, _Replay(self._kept).run)

    def clear(self) -> None:
        """Let go of what the recomputation did not ask for."""
        self._kept = []

    def _record(self, operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        random = torch.Tag.nondeterministic_seeded in operation.tags
        before = _random_state(args) if random else None
        result = operation(*args, **kwargs)
        after = _random_state(args) if before is not None else None
        moved = after if after is not None and before is not None and _differ(after, before) else None
        if operation is not _BERNOULLI:
            self._kept.append(_Output(operation, result, moved))
        else:
            self._kept.append(_Bits(result, moved) if moved is not None and _is_plain(result) else None)
        return result


class _Output:
    """What an operation returned, as long as nobody has written to it."""

    def __init__(self, operation: Any, result: Any, random: Tensor | None) -> None:
        self.operation = operation
        self.random = random  # the state of the generator after the operation, if it drew
        self._result = _each(_alias, result)
        self._versions = _versions(self._result)

    def result(self, args: Sequence[Any]) -> Any:
        """It, or ``None`` if it has been overwritten."""
        return self._result if _versions(self._result) == self._versions else None


class _Bits:
    """What ``bernoulli_`` wrote into a tensor."""

    operation = _BERNOULLI

    def __init__(self, drawn: Tensor, random: Tensor) -> None:
        self.random = random
        packed = torch.from_numpy(numpy.packbits(drawn.bool().numpy()))  # in the order of the shape
        self._bits = packed.clone()  # in the memory that torch counts

    def result(self, args: Sequence[Any]) -> Any:
        """Writes it into the tensor that is there now."""
        into: Tensor = args[0]
        bits = torch.from_numpy(numpy.unpackbits(self._bits.numpy(), count=into.numel()))
        return into.copy_(bits.view(into.shape))


class _Replay:
    def __init__(self, kept: list[_Output | _Bits | None]) -> None:
        self._kept, self._next = kept, 0

    def run(self, operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        place, self._next = self._next, self._next + 1
        output = self._kept[place] if place < len(self._kept) else None
        if output is None or output.operation is not operation:
            return operation(*args, **kwargs)
        self._kept[place] = None  # autograd makes it part of the new graph, so that it serves once
        result = output.result(args)
        if result is None:
            return operation(*args, **kwargs)
        if output.random is not None:
            _set_random_state(args, output.random)
        return result


class _Mode(TorchDispatchMode):
    def __init__(self, operations: frozenset[Any], run: Callable[[Any, Sequence[Any], dict[str, Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations, self._run = operations, run

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Modules inside that torch.compile has compiled may run; what happens in them is computed again."""
        return True

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in self._operations:
            return self._run(func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)


def _is_plain(drawn: Any) -> bool:
    return type(drawn) is Tensor and drawn.device.type == "cpu" and drawn.layout is torch.strided


def _alias(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    # Autograd will make ``value`` part of the graph, which would then hold itself. The alias shares its version.
    keys: Any = torch._C
    with keys._SetExcludeDispatchKeyGuard(keys.DispatchKey.ADInplaceOrView, False):
        return value.detach()


def _versions(result: Any) -> list[int]:
    return [one._version for one in _flat(result) if isinstance(one, Tensor) and not one.is_inference()]


def _each(function: Callable[[Any], Any], result: Any) -> Any:
    return type(result)(map(function, result)) if isinstance(result, (tuple, list)) else function(result)


def _flat(result: Any) -> Sequence[Any]:
    return result if isinstance(result, (tuple, list)) else (result,)


def _random_state(args: Sequence[Any]) -> Tensor | None:
    device = _device(args)
    if device is None:
        return None
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def _differ(after: Tensor, before: Tensor) -> bool:
    with _disable_current_modes():  # fake tensors cannot be compared
        return not torch.equal(after, before)


def _set_random_state(args: Sequence[Any], state: Tensor) -> None:
    device = _device(args)
    if device is None or device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def _device(args: Sequence[Any]) -> torch.device | None:
    return next((one.device for one in args if isinstance(one, Tensor)), None)

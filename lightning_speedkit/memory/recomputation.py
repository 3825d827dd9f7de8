"""The class that a checkpointed module has while it is checkpointed: its own, with a forward that keeps less.

A module becomes checkpointed by setting its ``__class__`` to a subclass made here, and plain again by setting it back.
Replacing the attribute ``forward`` instead would make every deep copy run the original's weights; a wrapper module
would rename the parameters.

The second run gets what the first one found: the arguments, with fresh lists and dicts around them; the buffers, as
copies, after which the real ones are put back, so that they advance once; the random state of torch, Python and numpy.
A parameter that has changed in between is an error, as it is without checkpointing. Setting BatchNorm's momentum to
zero would do for BatchNorm alone; copies are exact for spectral norm, codebooks and counters too.

What it costs: a forward copies its buffers, and those copies are kept until the backward that may be needed there: of
buffers up to 1 MiB all, of larger ones those whose version says that the forward wrote to them. On a CPU also the zeros
and ones that dropout drew, as one bit each, from a module's second forward on: drawing costs more than all else there.
"""

from __future__ import annotations

import copyreg
import functools
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import is_dataclass
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from typing_extensions import override

from lightning_speedkit.memory.checkpoint_policy import Offload, Policy, Recompute
from lightning_speedkit.memory.checkpoint_policy_kept import KeptOutputs
from lightning_speedkit.memory.host_random import read_host_random, write_host_random
from lightning_speedkit.memory.offload import offload_saved_tensors

__all__ = ["Recomputed", "plain_class", "recomputed_class"]

_SMALL = 1 << 20  # bytes
_ALL = Recompute()
_DRAW: WeakSet[nn.Module] = WeakSet()  # those whose last forward drew from torch's generator of the CPU
_ABSENT: Any = object()  # in place of a buffer that is not registered


class Recomputed(nn.Module):
    """Goes in front of a module's own class; its forward does something else only while the module trains.

    >>> layer = nn.Linear(2, 2)
    >>> layer.__class__ = recomputed_class(nn.Linear)
    >>> layer, isinstance(layer, nn.Linear), isinstance(layer, Recomputed)
    (Linear(in_features=2, out_features=2, bias=True), True, True)
    """

    checkpoint_policy: ClassVar[Policy] = _ALL

    def __init_subclass__(cls) -> None:
        """Hides the subclass from the original's own ``__init_subclass__``, which may be a registry."""

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run = super().forward
        if not (self.training and torch.is_grad_enabled()):
            return run(*args, **kwargs)
        policy = type(self).checkpoint_policy
        compiling = torch.compiler.is_compiling()
        if isinstance(policy, Offload):
            return (_offload_outside_the_graph if compiling else _offload)(self, policy, run, args, kwargs)
        if not compiling:
            return _run_eagerly(self, policy, run, args, kwargs)
        # torch.compile traces a checkpoint without contexts, or with torch's own for the kept operations alone.
        if next(self.buffers(), None) is not None:
            return _run_outside_the_graph(self, policy, run, args, kwargs)
        if policy.keep:
            kept = functools.partial(create_selective_checkpoint_contexts, list(policy.keep))
            return checkpoint(lambda: run(*args, **kwargs), use_reentrant=False, context_fn=kept)
        return checkpoint(lambda: run(*args, **kwargs), use_reentrant=False)

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy or a pickle is of the plain class: a file must not need this package, nor an average be recomputed.
        reduced = super().__reduce_ex__(protocol)
        if not isinstance(reduced, tuple):
            return reduced
        plain = plain_class(type(self))
        make, *arguments = (plain if part is type(self) else part for part in (reduced[0], *reduced[1]))
        if make is copyreg.__newobj__:  # type: ignore[attr-defined]  # pickle allows that one for our own class only
            make = plain.__new__
        return (make, tuple(arguments), *reduced[2:])


def recomputed_class(original: type[nn.Module], policy: Policy = _ALL) -> type[nn.Module]:
    """The subclass of a module's class that follows the policy; the same one each time, of the same name.

    >>> recomputed_class(nn.Linear) is recomputed_class(nn.Linear), recomputed_class(nn.Linear).__name__
    (True, 'Linear')
    """
    # Python keeps subclasses weakly, so that the one made for a class is found here for as long as it is in use.
    made: list[type[nn.Module]] = original.__subclasses__()
    for subclass in made:
        if subclass.__bases__ == (Recomputed, original) and vars(subclass)["checkpoint_policy"] == policy:
            return subclass
    names: dict[str, Any] = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "checkpoint_policy": policy,
        # so that inspect.signature still says what the module takes
        "forward": functools.wraps(original.forward)(
            lambda self, *args, **kwargs: Recomputed.forward(self, *args, **kwargs)
        ),
    }
    for name in ("__copy__", "__deepcopy__"):  # of the class's own, as a parametrized module has one
        if hasattr(original, name):
            names[name] = functools.partialmethod(_plain_copy, getattr(original, name))
    return types.new_class(original.__name__, (Recomputed, original), exec_body=lambda body: body.update(names))


def plain_class(subclass: type[nn.Module]) -> type[nn.Module]:
    """The class that :func:`recomputed_class` was given; other classes as they are.

    >>> plain_class(recomputed_class(nn.Linear)) is plain_class(nn.Linear) is nn.Linear
    True
    """
    if Recomputed not in subclass.__bases__:
        return subclass
    original: type[nn.Module] = subclass.__bases__[1]
    return original


def _plain_copy(module: nn.Module, make: Callable[..., nn.Module], *memo: Any) -> nn.Module:
    twin = make(module, *memo)
    if type(twin) is type(module):
        twin.__class__ = plain_class(type(module))
    return twin


def _run_eagerly(
    module: nn.Module, policy: Recompute, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    # Torch gets the tensors one by one, which makes it keep the random state of all their devices and raise if one is
    # overwritten before the backward. Keywords would be mistaken for options of its own.
    values, structure = tree_flatten((args, kwargs))
    beside = _tensors_beside(module, values)
    first = [(args, kwargs)]  # let go of in the first run: a list that gathers outputs would never be freed
    bits = module in _DRAW
    replay = _Replay(module, KeptOutputs(policy.keep, bits) if policy.keep or bits else None)

    def call(*values: Any) -> Any:
        args, kwargs = first.pop() if first else tree_unflatten(values[: len(values) - len(beside)], structure)
        return run(*args, **kwargs)

    return checkpoint(call, *values, *beside, use_reentrant=False, context_fn=lambda: (replay.remembering(), replay))


def _tensors_beside(module: nn.Module, values: list[Any]) -> list[Tensor]:
    """What torch does not see in the arguments: tensors of dataclasses, and on which device the module draws."""
    fields = (vars(value) for value in values if is_dataclass(value) and hasattr(value, "__dict__"))
    found = [tensor for of in fields for tensor in tree_leaves(of) if isinstance(tensor, Tensor)]
    if not any(isinstance(value, Tensor) for value in (*values, *found)):
        own = next(module.parameters(), None)
        if own is not None and not is_lazy(own) and own.device.type != "cpu":
            found.append(torch.empty(0, device=own.device))
    return found


def _offload(
    module: nn.Module, policy: Offload, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    with offload_saved_tensors(module, policy.min_bytes):
        return run(*args, **kwargs)


_outside: Callable[..., Any] = torch.compiler.disable
_run_outside_the_graph: Callable[..., Any] = _outside(
    _run_eagerly, reason="a module with buffers that is computed again runs eagerly"
)
_offload_outside_the_graph: Callable[..., Any] = _outside(
    _offload, reason="a module whose activations are offloaded runs eagerly"
)

_Place = tuple[nn.Module, str]  # where a parameter or a buffer is registered


class _Replay(AbstractContextManager[None]):
    """Around a recomputation: buffers and random state are what the first run found; then the real ones are back."""

    def __init__(self, module: nn.Module, kept: KeptOutputs | None = None) -> None:
        self._modules = tuple(module.modules())
        self._kept = kept
        self._replaying: AbstractContextManager[Any] = nullcontext()
        self._parameters: dict[_Place, tuple[Any, int]] = {}
        self._buffers: dict[_Place, Any] = {}
        self._random: tuple[Any, ...] | None = None  # nothing was drawn
        self._real: tuple[dict[_Place, Any], tuple[Any, ...] | None] = {}, None

    @contextmanager
    def remembering(self) -> Iterator[None]:
        """Around the first run: keeps what the recomputation needs."""
        before = {place: (buffer, _version(buffer)) for place, buffer in self._registered("_buffers")}
        copies = {id(buffer): _copy(buffer) for buffer, _ in before.values()}  # one buffer of two owners stays one
        found = read_host_random()
        drawn = _torch_random()
        with nullcontext() if self._kept is None else self._kept.recording():
            yield
        # Of those the next forward keeps what dropout draws.
        (_DRAW.discard if _torch_random() == drawn else _DRAW.add)(self._modules[0])
        self._random = found if read_host_random() != found else None
        # Noted after the run, in which a lazy module makes its parameters.
        self._parameters = {place: (value, _version(value)) for place, value in self._registered("_parameters")}
        after = dict(self._registered("_buffers"))
        for place in {**before, **after}:
            buffer, version = before.get(place, (_ABSENT, 0))
            now = after.get(place, _ABSENT)
            # Writes through .data, and those of batch norm, do not raise the version.
            if now is not buffer or _version(now) != version or _is_small(buffer):
                # Of a buffer that a lazy module has made in the run there is no earlier value.
                self._buffers[place] = _copy(now) if is_lazy(buffer) else copies.get(id(buffer), buffer)

    @override
    def __enter__(self) -> None:
        now = dict(self._registered("_parameters"))
        for (owner, name), (parameter, version) in self._parameters.items():
            if now.get((owner, name)) is not parameter or _version(parameter) != version:
                raise RuntimeError(_CHANGED.format(owner=type(owner).__name__, name=name))
        buffers = dict(self._registered("_buffers"))
        real = {place: buffers.get(place, _ABSENT) for place in self._buffers}
        self._real = real, None if self._random is None else read_host_random()
        copies = {id(buffer): _copy(buffer) for buffer in self._buffers.values()}
        _register({place: copies[id(buffer)] for place, buffer in self._buffers.items()})
        if self._random is not None:
            write_host_random(self._random)
        if self._kept is not None:
            self._replaying = self._kept.replaying()
            self._replaying.__enter__()

    @override
    def __exit__(self, *exception: Any) -> None:
        if self._kept is not None:
            self._replaying.__exit__(*exception)
            self._kept.clear()
        buffers, random = self._real
        _register(buffers)
        if random is not None:
            write_host_random(random)
        self._real = {}, None

    def _registered(self, kind: str) -> Iterator[tuple[_Place, Any]]:
        # named_buffers() leaves out those that are None, and costs several times as much.
        for owner in self._modules:
            for name, value in getattr(owner, kind).items():
                yield (owner, name), value


def _register(buffers: dict[_Place, Any]) -> None:
    for (owner, name), buffer in buffers.items():
        if buffer is _ABSENT:
            owner._buffers.pop(name, None)
        else:
            owner._buffers[name] = buffer


def _torch_random() -> bytes:
    with _disable_current_modes():  # under fake tensors there would be no bytes
        state: bytes = torch.get_rng_state().numpy().tobytes()
    return state


def _copy(buffer: Any) -> Any:
    return buffer.detach().clone() if _holds_data(buffer) else buffer


def _version(value: Any) -> int:
    # An inference tensor has no version, and cannot be written to while training.
    version: int = value._version if _holds_data(value) and not value.is_inference() else 0
    return version


def _is_small(buffer: Any) -> bool:
    return _holds_data(buffer) and buffer.numel() * buffer.element_size() <= _SMALL


def _holds_data(value: Any) -> bool:
    return isinstance(value, Tensor) and not is_lazy(value)


_CHANGED = (
    "The parameter {name!r} of {owner} in a checkpointed module is not what it was in the forward, so that the "
    "activations cannot be computed again: the gradients would be wrong. Run all backwards of a forward before "
    "optimizer.step(), or the forward again after it. Do not checkpoint what runs under torch.func.functional_call."
)

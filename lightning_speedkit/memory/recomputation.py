"""The class that a checkpointed module has while it is checkpointed: its own, with a forward that is computed twice.

A module becomes checkpointed by setting its ``__class__`` to a subclass made here, and plain again by setting it back.
Replacing the attribute ``forward`` instead would make every deep copy run the original's weights; a wrapper module
would rename the parameters.

Buffers advance once per forward: the recomputation works on copies of what the first forward found, and the real ones
are put back after it. Setting BatchNorm's momentum to zero would do for BatchNorm alone; copies are exact for spectral
norm, codebooks and counters too. What it costs: one copy of those buffers that the forward changes, until the backward.
"""

from __future__ import annotations

import copyreg
import functools
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

__all__ = ["Recomputed", "plain_class", "recomputed_class"]


class Recomputed(nn.Module):
    """Goes in front of a module's own class; its forward does something else only while the module trains.

    >>> layer = nn.Linear(2, 2)
    >>> layer.__class__ = recomputed_class(nn.Linear)
    >>> layer, isinstance(layer, nn.Linear), isinstance(layer, Recomputed)
    (Linear(in_features=2, out_features=2, bias=True), True, True)
    """

    def __init_subclass__(cls) -> None:
        """Hides the subclass from the original's own ``__init_subclass__``, which may be a registry."""

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run = super().forward
        if not (self.training and torch.is_grad_enabled()):
            return run(*args, **kwargs)
        if next(self.buffers(), None) is not None:
            return _run_with_buffers(self, run, args, kwargs)
        call, values = _by_position(run, args, kwargs)
        return checkpoint(call, *values, use_reentrant=False)

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


def recomputed_class(original: type[nn.Module]) -> type[nn.Module]:
    """The subclass of a module's class that recomputes; the same one each time, of the same name.

    >>> recomputed_class(nn.Linear) is recomputed_class(nn.Linear), recomputed_class(nn.Linear).__name__
    (True, 'Linear')
    """
    # Python keeps subclasses weakly, so that the one made for a class is found here for as long as it is in use.
    made: list[type[nn.Module]] = original.__subclasses__()
    for subclass in made:
        if subclass.__bases__ == (Recomputed, original):
            return subclass
    names = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        # so that inspect.signature still says what the module takes
        "forward": functools.wraps(original.forward)(
            lambda self, *args, **kwargs: Recomputed.forward(self, *args, **kwargs)
        ),
    }
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


def _by_position(
    run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    # Keyword arguments go in by position: torch looks at positional ones only for the device whose random state it
    # keeps, and has options of its own that a keyword could be mistaken for.
    names, count = tuple(kwargs), len(args)

    def call(*values: Any) -> Any:
        return run(*values[:count], **dict(zip(names, values[count:], strict=True)))

    return call, (*args, *kwargs.values())


def _run_eagerly(module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        replay = _Replay()
        return _remembering(module, replay), replay

    call, values = _by_position(run, args, kwargs)
    return checkpoint(call, *values, use_reentrant=False, context_fn=contexts)


# torch.compile traces a checkpoint without contexts and refuses one with them, so this part stays eager.
_run_with_buffers: Callable[..., Any] = torch.compiler.disable(_run_eagerly)  # type: ignore[no-untyped-call]


class _Replay:
    """Around a recomputation: its buffers are copies of what the first forward found; then the real ones are back."""

    def __init__(self) -> None:
        self.found: list[tuple[nn.Module, str, Tensor]] = []
        self._real: list[tuple[nn.Module, str, Any]] = []

    def __enter__(self) -> None:
        self._real = [(owner, name, getattr(owner, name)) for owner, name, _ in self.found]
        copies = {id(value): value.clone() for _, _, value in self.found}  # one buffer of two owners stays one
        for owner, name, value in self.found:
            setattr(owner, name, copies[id(value)])

    def __exit__(self, *exception: object) -> None:
        for owner, name, value in self._real:
            setattr(owner, name, value)
        self._real = []


@contextmanager
def _remembering(module: nn.Module, replay: _Replay) -> Iterator[None]:
    before = [
        (owner, name, buffer, buffer._version)
        for owner in module.modules()
        for name, buffer in owner.named_buffers(recurse=False)
        if not buffer.is_inference()  # an inference tensor cannot be written to while training
    ]
    copies = {id(buffer): buffer.detach().clone() for _, _, buffer, _ in before}
    yield
    for owner, name, buffer, version in before:
        # Keeps only what the forward has changed, so that a large mask costs nothing. Batch norm writes its statistics
        # without raising their version, whoever calls it: they are what a one-dimensional float buffer may be.
        unversioned = buffer.ndim == 1 and buffer.is_floating_point()
        if unversioned or getattr(owner, name) is not buffer or buffer._version != version:
            replay.found.append((owner, name, copies[id(buffer)]))

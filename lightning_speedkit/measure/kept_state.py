"""Everything that a trial of training touches, kept before it and put back after it, as often as it is asked.

Kept are random states; parameters, gradients and buffers; the attributes of modules, optimizers, schedulers and loaders
that are numbers, texts, tensors, generators, or lists, dicts and sets of them, which covers the state of an optimizer
and of torchmetrics; and where a loader is. Tensors get their values back in place, so that whoever refers to them still
does. The copies are on the host: on the device they would leave less room than the training has.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader

__all__ = ["GENERATORS", "KeptState", "keeping"]

GENERATORS = (torch.Generator, random.Random, numpy.random.Generator)


class KeptState:
    """Remembers what it is shown, and puts it back as often as :meth:`restore` is called.

    >>> layer = nn.Linear(1, 1)
    >>> before, kept = layer.weight.item(), KeptState()
    >>> kept.module(layer)
    >>> _ = nn.init.constant_(layer.weight, 5.0)
    >>> kept.restore()
    >>> layer.weight.item() == before
    True
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._at_end: list[Callable[[], None]] = []
        self._seen: set[int] = set()

    def random_states(self) -> None:
        """Of Python, numpy and torch, on all devices of CUDA."""
        python, array, cpu = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]

        def undo() -> None:
            random.setstate(python)
            numpy.random.set_state(array)
            torch.set_rng_state(cpu)
            if cuda:
                torch.cuda.set_rng_state_all(cuda)

        self._undo.append(undo)

    def module(self, module: nn.Module) -> None:
        """Parameters, gradients, buffers, and the attributes of all parts."""
        for part in module.modules():
            self.attributes(part, skip=("_modules",))
            for parameter in part.parameters(recurse=False):
                self._gradient(parameter)

    def attributes(self, owner: object, skip: Iterable[str] = (), contents: tuple[type, ...] = (object,)) -> None:
        """The attributes of an object, that it has no others, and the contents of those of some types."""
        values = {name: value for name, value in vars(owner).items() if name not in skip}

        def undo() -> None:
            current = vars(owner)
            for name in current.keys() - values.keys() - {*skip}:
                del current[name]
            current.update(values)

        self._undo.append(undo)
        for value in values.values():
            if isinstance(value, contents):
                self._content(value)

    def replaced(self, owner: object, name: str, value: Any) -> None:
        """Put another value in an attribute until things are put back."""
        found, inherited = getattr(owner, name), name not in vars(owner) and callable(getattr(type(owner), name, None))
        setattr(owner, name, value)
        self._undo.append(lambda: vars(owner).pop(name, None) if inherited else setattr(owner, name, found))

    def loaders(self, given: Any) -> None:
        """Where the loaders are that ``fit`` was given: one, or a list or dict of them; see :meth:`loader`."""
        if isinstance(given, CombinedLoader):
            self.attributes(given)
        else:
            given = CombinedLoader(given, "max_size_cycle")
        for loader in given.flattened:
            self.loader(loader)

    def loader(self, loader: Any) -> None:
        """Where a loader is: its generators and samplers, or its state if it has one. Not its dataset.

        Workers that it kept rest meanwhile.

        Raises:
            ValueError: It is an iterator, which gives each batch once.
        """
        if hasattr(loader, "__next__"):
            raise ValueError(
                f"The training batches come from a {type(loader).__name__}, which gives each of them once, so a "
                "trial would take them from the training. Give what can be iterated again, such as a DataLoader."
            )
        if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
            state = loader.state_dict()
            self._undo.append(lambda: loader.load_state_dict(state))
        elif isinstance(loader, DataLoader):
            iterator = vars(loader).get("_iterator")
            vars(loader)["_iterator"] = None  # workers that persist stay with the iterator that they are of
            self._at_end.append(lambda: vars(loader).update(_iterator=iterator))
            inner = getattr(loader.batch_sampler, "sampler", None)
            for owner in (loader, loader.sampler, loader.batch_sampler, inner):
                if hasattr(owner, "__dict__") and id(owner) not in self._seen:
                    self._seen.add(id(owner))
                    self.attributes(owner, skip=("dataset", "data_source"))

    def restore(self) -> None:
        """Put everything back, what was kept last first."""
        with torch.no_grad():
            for undo in reversed(self._undo):
                undo()

    def finish(self) -> None:
        """Put everything back for the last time."""
        self.restore()
        for undo in reversed(self._at_end):
            undo()

    def _gradient(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        values = None if gradient is None else _on_host(gradient)

        def undo() -> None:
            if gradient is not None and values is not None:
                gradient.data.copy_(values)
            parameter.grad = gradient

        self._undo.append(undo)

    def _content(self, value: Any) -> None:
        if id(value) in self._seen:
            return
        undo, parts = _undo_of(value)
        if undo is not None:
            self._seen.add(id(value))
            self._undo.append(undo)
        for part in parts:
            self._content(part)


@contextmanager
def keeping() -> Iterator[KeptState]:
    """A :class:`KeptState` that puts everything back at the end of the ``with``, whatever happens there.

    >>> layer = nn.Linear(1, 1)
    >>> before = layer.weight.item()
    >>> with keeping() as kept:
    ...     kept.module(layer)
    ...     _ = nn.init.constant_(layer.weight, 5.0)
    >>> layer.weight.item() == before
    True
    """
    kept = KeptState()
    try:
        yield kept
    finally:
        kept.finish()


def _undo_of(value: Any) -> tuple[Callable[[], None] | None, Iterable[Any]]:
    """What gives a value that can change its contents back, and the values that it contains."""
    if isinstance(value, Tensor):
        return _undo_of_tensor(value), ()
    if isinstance(value, numpy.ndarray):
        array = value.copy()
        return lambda: numpy.copyto(value, array), ()
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: _set_state(value, state), ()
    if isinstance(value, random.Random):
        words = value.getstate()
        return lambda: value.setstate(words), ()
    if isinstance(value, numpy.random.Generator):
        bits = value.bit_generator.state
        return lambda: setattr(value.bit_generator, "state", bits), ()
    if isinstance(value, dict):
        pairs = dict(value)
        return lambda: _fill(value, value.update, pairs), pairs.values()
    if isinstance(value, (list, deque)):
        items = list(value)
        return lambda: _fill(value, value.extend, items), items
    if isinstance(value, set):
        members = set(value)
        return lambda: _fill(value, value.update, members), ()
    return None, value if isinstance(value, tuple) else ()


def _undo_of_tensor(tensor: Tensor) -> Callable[[], None] | None:
    strided = tensor.layout is torch.strided
    if tensor.is_meta or nn.parameter.is_lazy(tensor) or tensor.is_inference():
        return None
    if strided and any(step == 0 and n > 1 for step, n in zip(tensor.stride(), tensor.shape, strict=True)):
        return None  # expanded: it has fewer values than elements, and cannot be written as a whole
    values = _on_host(tensor)

    def undo() -> None:
        tensor.data.copy_(values)

    return undo


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _set_state(generator: torch.Generator, state: Tensor) -> None:
    generator.set_state(state)


def _fill(container: Any, fill: Callable[[Any], None], contents: Any) -> None:
    container.clear()
    fill(contents)

"""What a trial of a batch size changes, put back after each trial; the copies are on the host.

Kept are random states; parameters, gradients and buffers; and the attributes of modules, optimizers, schedulers and
loaders that are numbers, texts, tensors, generators, or lists, dicts and sets of them. Tensors get their values back in
place. A copy on the device would leave less room than the training has.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy
import torch
from torch import Tensor, nn

__all__ = ["GENERATORS", "Kept"]

GENERATORS = (torch.Generator, random.Random, numpy.random.Generator)


class Kept:
    """Remembers what it is shown, and puts it back as often as :meth:`restore` is called.

    >>> layer = nn.Linear(1, 1)
    >>> before, kept = layer.weight.item(), Kept()
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

    def loader(self, loader: Any) -> None:
        """Where a DataLoader is: its generators and samplers, not its dataset; workers that it kept rest meanwhile."""
        iterator = vars(loader).get("_iterator")
        vars(loader)["_iterator"] = None  # workers that persist stay with the iterator that they are of
        self._at_end.append(lambda: vars(loader).update(_iterator=iterator))
        inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
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
        for undo in self._at_end:
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

"""The bytes that a run holds at once, storage by storage: which lives from when to when.

Every operation goes through a dispatch mode, which sees each storage that is made; a weak reference tells when it is
freed. Views are one storage. Storages that were there before (parameters, buffers) do not count, and the gradient of a
parameter counts until it has been accumulated. Time is the number of the operation.

What it costs: work in Python per operation while it counts, so that the run is slower. Buffers inside one kernel are
not seen; those of convolutions on a CPU, which are the large ones, are reckoned from the sizes of the tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import get_world_size, is_initialized
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

__all__ = ["LiveBytes", "Pack", "StorageLife", "at_each_gradient", "storage_of"]

_CONVOLUTIONS: tuple[Any, Any] = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
_onednn_is_there: Callable[..., Any] = torch.backends.mkldnn.is_available
_ONEDNN = (torch.float32, torch.bfloat16, torch.float16)
_BETWEEN_RANKS = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_EXCHANGE = (
    "budget: the step exchanges tensors with other ranks ({name}), and ranks that take different numbers of trial "
    "steps would wait for each other without end. Name the modules to checkpoint instead; if it is DDP that exchanges "
    "gradients, run inside no_sync()."
)


@dataclass(slots=True)
class Pack:
    """One save by autograd of a storage: when, when it was first wanted back, and when it was let go of."""

    saved: int
    wanted: int | None = None
    released: int | None = None


@dataclass(slots=True)
class StorageLife:
    """One storage: its bytes, when it was made, last read in the forward and freed, and the saves of it."""

    nbytes: int
    made: int
    read: int
    freed: int | None = None
    packs: list[Pack] = field(default_factory=list)


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is on, ``now`` and ``peak`` are the bytes of the living storages that were made since it is on.

    In a ``trial``, a run that plans are made from, ``peak`` has the buffers inside convolutions on a CPU in it too, and
    exchanging tensors with other ranks raises ``RuntimeError``.

    >>> with LiveBytes() as live:
    ...     x = torch.ones(256)
    ...     y = x.view(2, 128) + 1
    ...     del x
    >>> live.now, live.peak
    (1024, 2048)
    """

    def __init__(self, trial: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trial = trial
        self.now = self.peak = self.clock = 0
        self.backward: int | None = None  # when autograd first wanted something back
        self.lives: list[StorageLife] = []
        self._known: dict[int, int | None] = {}  # of a storage's address: the place in lives; None if it was there
        self._references: dict[int, weakref.ref[Any]] = {}  # which tell when a storage is freed

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._trial:
            _refuse_exchange(func)
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                place = self.place(tensor)
                if place is not None and self.backward is None:
                    self.lives[place].read = self.clock
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._note(tensor)
        if self._trial:
            self._note_inside(_bytes_inside(func, args, result))
        self.clock += 1
        return result

    def place(self, tensor: Tensor) -> int | None:
        """The place in ``lives`` of a tensor's storage; ``None`` if it was there before, and it is noted as such."""
        storage = storage_of(tensor)
        if storage is None:
            return None
        key = storage._cdata
        if key not in self._known:
            self._know(storage, None)
        return self._known[key]

    def leave_out(self, tensor: Tensor) -> None:
        """Counts a living storage no more, as one that was there before."""
        place = self.place(tensor)
        storage = storage_of(tensor)
        if place is not None and storage is not None:
            self._known[storage._cdata] = None
            self._free(place)

    def _note(self, tensor: Tensor) -> None:
        storage = storage_of(tensor)
        if storage is None or storage._cdata in self._known or not storage.nbytes():
            return
        place = len(self.lives)
        self.lives.append(StorageLife(storage.nbytes(), self.clock, self.clock))
        self._know(storage, place)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)

    def _note_inside(self, nbytes: int) -> None:
        """Counts what an operation holds beside its results, during the operation only."""
        if nbytes:
            self.lives.append(StorageLife(nbytes, self.clock, self.clock, freed=self.clock + 1))
            self.peak = max(self.peak, self.now + nbytes)

    def _know(self, storage: Any, place: int | None) -> None:
        key = storage._cdata
        self._known[key] = place
        self._references[key] = weakref.ref(storage, lambda _: self._gone(key))

    def _gone(self, key: int) -> None:
        self._references.pop(key, None)
        place = self._known.pop(key, None)
        if place is not None:
            self._free(place)

    def _free(self, place: int) -> None:
        self.lives[place].freed = self.clock
        self.now -= self.lives[place].nbytes


@contextmanager
def at_each_gradient(model: nn.Module, tell: Callable[[Tensor], None]) -> Iterator[None]:
    def note(parameter: Tensor) -> None:
        if parameter.grad is not None:
            tell(parameter.grad)

    with ExitStack() as stack:
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_leaf:
                register: Callable[..., Any] = parameter.register_post_accumulate_grad_hook
                stack.callback(register(note).remove)
        yield


def _refuse_exchange(func: Any) -> None:
    if func.namespace in _BETWEEN_RANKS and is_initialized() and get_world_size() > 1:
        raise RuntimeError(_EXCHANGE.format(name=func))


def _bytes_inside(func: Any, args: Any, result: Any) -> int:
    """What a convolution on a CPU holds for copies in oneDNN's own layout, which the allocator gives out too.

    The forward copies the input and the result, the first of which is gone when the result is laid out as usual; the
    backward copies the input and the gradient. Tensors in the layout ``channels_last`` are taken as they are.
    """
    if func not in _CONVOLUTIONS or not _onednn_is_there():
        return 0
    backward = func is _CONVOLUTIONS[1]
    x, weight = args[1:3] if backward else args[:2]
    plain = x.device.type == "cpu" and x.dtype in _ONEDNN and x.is_contiguous() and weight.is_contiguous()
    if not plain:
        return 0
    return int(x.nbytes + args[0].nbytes if backward else max(x.nbytes, result.nbytes))


def storage_of(tensor: Tensor) -> Any:
    """The storage, which has an identity; ``None`` of a sparse tensor, or one that is made of others."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None

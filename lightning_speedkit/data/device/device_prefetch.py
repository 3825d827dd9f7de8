"""The next batch travels to the device while the current one is computed.

What it does: it wraps a loader, and copies each batch to a CUDA device on a stream of its own, from page-locked memory,
before it is asked for. What it hands out is on the device already, so Lightning's own transfer has nothing left to do.
When it helps: batches that take long to copy next to the time of a step: large images, short steps, a slow bus.
What it costs: device memory for ``depth`` more batches, and host memory for as many. On the CPU it does nothing.

Not yet run on a GPU: the order of fetching and the state are tested, the copy itself is not.

Source: Lightning #1316 and #2611; PyTorch's notes on CUDA semantics.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import Self, override

from lightning_speedkit.data.argument_checks import a_type, checked_integer
from lightning_speedkit.data.device.device_copy import CopyUnderWay, CudaCopies
from lightning_speedkit.errors import HardwareNeedError

__all__ = ["DevicePrefetcher"]


@dataclass(frozen=True, slots=True)
class _Fetched:
    """What the loader gave: a batch whose copy was begun, an error, or, without both, its end."""

    copy: CopyUnderWay | None = None
    error: Exception | None = None
    state: Any = None


class DevicePrefetcher:
    """A loader whose batches are on the device when they are handed out.

    Everything else is the loader's: its length, ``sampler``, ``batch_size``, ``set_epoch``, ``close`` and whatever it
    has, and ``state_dict`` and ``load_state_dict`` if it has both. The state is that of the batches handed out and does
    not count what was fetched ahead; it is read from the loader after each batch. An error of the loader is raised
    where its batch would have come.

    Batches that were fetched ahead are dropped when an iteration is left early; a loader that starts from its beginning
    each time loses nothing by it.

    Args:
        loader: Any iterable of batches. Batches in page-locked memory are copied from there; others are first copied to
            such memory, on the host.
        device: Where to; everything but a CUDA device passes the batches through as they are.
        depth: Batches that are fetched ahead of the one handed out, at least 1.

    Raises:
        HardwareNeedError: The device is a CUDA device and there is none.

    Example::

        >>> loader = torch.utils.data.DataLoader(torch.arange(4.0), batch_size=2)
        >>> ahead = DevicePrefetcher(loader, "cpu")
        >>> list(ahead), len(ahead), ahead.batch_size
        ([tensor([0., 1.]), tensor([2., 3.])], 2, 2)
    """

    def __new__(cls, loader: Iterable[Any], device: torch.device | str, *, depth: int = 1) -> Self:  # noqa: ARG004
        # Lightning takes a loader that has the two methods for one that can be resumed.
        stateful = callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))
        return super().__new__(_StatefulPrefetcher if stateful and cls is DevicePrefetcher else cls)  # type: ignore[return-value]

    def __init__(self, loader: Iterable[Any], device: torch.device | str, *, depth: int = 1) -> None:
        if not isinstance(loader, Iterable):
            raise TypeError(f"loader must be an iterable of batches, got {a_type(loader)}.")
        self.loader = loader
        self.device = torch.device(device)
        self.depth = checked_integer("depth", depth, 1)
        self._iteration: object = None
        self._handed_out: Any = None
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise HardwareNeedError(f"DevicePrefetcher(device={str(device)!r}) needs a CUDA device, and there is none.")
        if self.device.type not in ("cuda", "cpu"):
            rank_zero_warn(f"DevicePrefetcher copies nothing ahead to {self.device}: it does so for CUDA devices only.")

    def __iter__(self) -> Iterator[Any]:
        begin = self._copies()
        return iter(self.loader) if begin is None else self._ahead(begin)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "loader":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.loader, name)

    def _copies(self) -> Callable[[Any], CopyUnderWay] | None:
        """What begins the copy of a batch, or ``None`` where nothing is copied ahead."""
        return CudaCopies(self.device).begin if self.device.type == "cuda" else None

    def _loader_state(self) -> Any:
        return None

    def _ahead(self, begin: Callable[[Any], CopyUnderWay]) -> Iterator[Any]:
        this = self._iteration = object()
        self._handed_out = self._loader_state()
        source = iter(self.loader)
        waiting: deque[_Fetched] = deque()
        being_read: deque[CopyUnderWay] = deque()  # of batches handed out, whose memory on the host is still needed
        try:
            while True:
                while being_read and being_read[0].is_done():
                    being_read.popleft()
                while len(waiting) <= self.depth and (not waiting or waiting[-1].copy is not None):
                    waiting.append(self._fetched(source, begin))
                first = waiting.popleft()
                if first.error is not None:
                    raise first.error
                if this is self._iteration:
                    self._handed_out = first.state
                if first.copy is None:
                    return
                being_read.append(first.copy)
                del first  # or the memory on the host would be held until the next batch is asked for
                yield being_read[-1].hand_out()
        finally:
            for under_way in (*being_read, *(one.copy for one in waiting if one.copy is not None)):
                under_way.wait()

    def _fetched(self, source: Iterator[Any], begin: Callable[[Any], CopyUnderWay]) -> _Fetched:
        try:
            batch = next(source)
        except StopIteration:
            return _Fetched(state=self._loader_state())
        except Exception as error:
            return _Fetched(error=error)
        state = self._loader_state()  # before the next batch is fetched
        try:
            return _Fetched(copy=begin(batch), state=state)
        except Exception as error:
            return _Fetched(error=error)


class _StatefulPrefetcher(DevicePrefetcher):
    def state_dict(self) -> Any:
        """The state of the loader as of the batches handed out."""
        return self._loader_state() if self._handed_out is None else copy.deepcopy(self._handed_out)

    def load_state_dict(self, state_dict: Any) -> None:
        """Set the state of the loader, for the next iteration."""
        self._iteration = self._handed_out = None
        self.loader.load_state_dict(state_dict)  # type: ignore[attr-defined]

    @override
    def _loader_state(self) -> Any:
        return copy.deepcopy(self.loader.state_dict())  # type: ignore[attr-defined]

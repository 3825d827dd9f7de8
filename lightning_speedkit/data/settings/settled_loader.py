"""The user's DataLoader with other workers, and the same batches in the same order.

A DataLoader draws a number for its workers each time it is iterated, from its generator or from the global random
state; workers that are kept skip that draw, and workers that are new make the sampler begin earlier. So the same
loader with other settings shuffles differently from the second epoch on, and leaves another random state to the
model's dropout. :class:`SettledLoader` draws what the user's loader would have drawn, when it would have, and hands
the order of the user's sampler to an inner DataLoader that has the new settings and random numbers of its own.

Workers that are kept would not see what the training process assigns to the dataset between epochs (a difficulty, an
epoch). They are started anew when an attribute of the dataset was assigned.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from lightning_speedkit.data.argument_checks import a_type
from lightning_speedkit.data.settings.loader_orders import BegunOrder, HandedOrder
from lightning_speedkit.data.settings.loader_settings import LoaderSettings

__all__ = ["SettledLoader", "settle", "why_not_settled"]

_DEPTH = 4  # datasets around datasets, and their transforms


class SettledLoader(DataLoader[Any]):
    """A DataLoader that draws and begins like another one. Make one with :func:`settle`.

    It has no constructor of its own: Lightning makes it anew to put a distributed sampler in, and copies what was set
    on it.
    """

    had_workers = False
    kept_workers = False
    looked_ahead = 0
    _inner: DataLoader[Any] | None = None
    _handed: HandedOrder | None = None
    _seen: list[Any] | None = None
    _last: BegunOrder | None = None

    @override
    def __iter__(self) -> Any:
        index_sampler: Any = self.sampler if self.batch_sampler is None else self.batch_sampler
        if self._last is not None:
            self._last.take_back()
        indices, seed = iter(index_sampler), None
        if self._last is None or not (self.had_workers and self.kept_workers):
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=self.generator).item())
            if self.had_workers:
                indices = iter(index_sampler)  # torch begins a second time once its workers run
        self._last = order = BegunOrder(indices, _length(index_sampler), self._generators())
        if not self.had_workers:
            return self._begin_late(order, seed)
        order.ask(self.looked_ahead)
        return self._hand_out(self._begin(order, seed), order)

    def close(self) -> None:
        """End the workers that were kept."""
        self._inner = self._seen = None

    def _begin_late(self, order: BegunOrder, seed: int | None) -> Iterator[Any]:
        yield from self._hand_out(self._begin(order, seed), order)
        order.ask_to_the_end()

    def _hand_out(self, batches: Iterator[Any], order: BegunOrder) -> Iterator[Any]:
        try:
            for given, batch in enumerate(batches, start=1):
                order.ask(self.looked_ahead + given)
                yield batch
        finally:
            order.take_back()

    def _begin(self, order: BegunOrder, seed: int | None) -> Iterator[Any]:
        seen = _assigned(self.dataset) if self.persistent_workers else None
        if self._inner is None or not _same(seen, self._seen):
            self._inner, self._handed = self._made_inner()
        self._seen = seen
        inner, handed = self._inner, self._handed
        assert handed is not None
        handed.order = order
        if seed is not None:
            inner.generator = torch.Generator().manual_seed(seed)
        return iter(inner)

    def _generators(self) -> list[torch.Generator]:
        """Those that the order may be drawn from, each once."""
        places = (self, self.sampler, self.batch_sampler, getattr(self.batch_sampler, "sampler", None))
        found = {id(generator): generator for place in places if (generator := getattr(place, "generator", None))}
        return [generator for generator in found.values() if isinstance(generator, torch.Generator)]

    def _made_inner(self) -> tuple[DataLoader[Any], HandedOrder]:
        handed = HandedOrder()
        places: dict[str, Any] = {"batch_sampler": handed}
        if self.batch_sampler is None:
            places = {"sampler": handed, "batch_size": None}
        inner: DataLoader[Any] = DataLoader(
            self.dataset,
            num_workers=self.num_workers,
            generator=torch.Generator(),
            collate_fn=self.collate_fn,
            pin_memory=self.pin_memory,
            timeout=self.timeout,
            worker_init_fn=self.worker_init_fn,
            multiprocessing_context=self.multiprocessing_context,
            prefetch_factor=self.prefetch_factor,
            persistent_workers=self.persistent_workers,
            in_order=self.in_order,
            **places,
        )
        return inner, handed


def why_not_settled(loader: object) -> str:
    """Why this loader cannot be made anew with other settings; empty if it can.

    >>> why_not_settled(DataLoader([1, 2, 3]))
    ''
    >>> why_not_settled([1, 2, 3])
    'a list is no torch DataLoader'
    """
    kind = type(loader).__name__
    if type(loader) is SettledLoader:
        return "its settings were chosen already"
    if not isinstance(loader, DataLoader):
        return f"a {kind} is no torch DataLoader"
    if type(loader) is not DataLoader:
        return f"a {kind} is a DataLoader of its own kind, which only its author knows how to make anew"
    if isinstance(loader.dataset, IterableDataset):
        return "an IterableDataset may give each sample to several workers"
    if not hasattr(loader.dataset, "__len__"):
        return f"{a_type(loader.dataset)} has no length"
    return ""


def settle(loader: DataLoader[Any], settings: LoaderSettings) -> SettledLoader:
    """A loader of the same batches in the same order with these settings; the given one is left as it is.

    What the settings do not decide is the loader's own: sampler, collate function, generator, ``drop_last``,
    ``worker_init_fn``, ``timeout``, ``in_order``, its start method, and ``pin_memory`` where it is on.

    >>> loader = DataLoader(torch.arange(4), batch_size=2)
    >>> settled = settle(loader, LoaderSettings(num_workers=0))
    >>> [batch.tolist() for batch in settled]
    [[0, 1], [2, 3]]
    """
    if reason := why_not_settled(loader):
        raise TypeError(f"The loader cannot be made anew with other settings: {reason}.")
    places: dict[str, Any]
    if loader.batch_sampler is not None and loader.batch_size is None:
        places = {"batch_sampler": loader.batch_sampler}
    else:
        places = {"batch_size": loader.batch_size, "sampler": loader.sampler, "drop_last": loader.drop_last}
    with_workers = settings.num_workers > 0
    settled = SettledLoader(
        loader.dataset,
        num_workers=settings.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=settings.pin_memory or loader.pin_memory,
        timeout=loader.timeout if with_workers else 0,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context if with_workers else None,
        generator=loader.generator,
        prefetch_factor=settings.prefetch_factor if with_workers else None,
        persistent_workers=settings.persistent_workers and with_workers,
        in_order=loader.in_order,
        **places,
    )
    settled.had_workers = loader.num_workers > 0
    settled.kept_workers = loader.persistent_workers
    settled.looked_ahead = loader.num_workers * (loader.prefetch_factor or 0)
    return settled


def _length(order: Any) -> int | None:
    try:
        return len(order)
    except TypeError:
        return None


def _assigned(thing: Any, depth: int = _DEPTH) -> list[Any]:
    """What the attributes of a dataset are now, with those of the objects in them."""
    found: list[Any] = []
    attributes = getattr(thing, "__dict__", None)
    if depth == 0 or attributes is None or isinstance(thing, (type, torch.Tensor)):
        return found
    for name, value in attributes.items():
        found.extend((name, value))
        found.extend(_assigned(value, depth - 1))
    return found


def _same(now: list[Any] | None, before: list[Any] | None) -> bool:
    if now is None or before is None:
        return now is before
    plain = (bool, int, float, str, bytes)
    return len(now) == len(before) and all(
        one is other or (isinstance(one, plain) and type(one) is type(other) and one == other)
        for one, other in zip(now, before, strict=True)
    )

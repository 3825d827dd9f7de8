"""A loader that writes batches into memory which is used again and again, and starts again where it stopped.

When it helps: whenever the training loop waits for data. Batches of a store are gathered straight from its memory map
into a ring of buffers, by threads for copying and for decoding pictures, by processes for transforms written in Python.
The order is a pure function of (seed, epoch), so a run resumes in the middle of an epoch at once, with as many ranks as
it likes, and gets exactly the samples that are left.

What it costs: the memory of the ring (some batches), and one thread or process per worker.

To Lightning it is a plain iterable: it shards by itself from ``rank`` and ``world_size``, is told the epoch through
``batch_sampler.sampler.set_epoch``, and is saved in a checkpoint by its ``state_dict``.

Source: the destination of a batch, not the store, decides the speed: see ``docs/methods/loader.md`` for what was
measured.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from lightning_speedkit.data.argument_checks import checked_integer
from lightning_speedkit.data.loading.crew_for_dataset import crew_for_dataset, is_of_use
from lightning_speedkit.data.loading.epoch_tasks import BatchesAhead, EpochTasks
from lightning_speedkit.data.loading.loader_crew import Crew
from lightning_speedkit.data.loading.loader_position import LoaderPosition
from lightning_speedkit.data.loading.shuffle_choice import choose_order
from lightning_speedkit.data.loading.worker_choice import check_workers
from lightning_speedkit.errors import LoaderError

__all__ = ["RingLoader"]


class RingLoader:
    """Batches of a map-style dataset, for a training loop or for Lightning.

    Batches are what :func:`~lightning_speedkit.data.collate_samples` makes of the samples, in CPU memory. They may be
    kept: memory is used again only when nothing refers to it any more.

    Args:
        dataset: an :class:`LMDBDataset`, or any dataset with ``__len__`` and ``__getitem__``.
        batch_size: samples per batch and rank.
        shuffle: ``False``, ``"full"``, ``"blocks"`` (see ``EpochOrder``), or ``True``: blocks if the store is larger
            than half of the memory or has more than 16 million samples, else full. The choice is logged.
        seed: of the order, and of the random numbers of a transform.
        drop_last: leave out a last batch that is smaller than the others.
        remainder: what to do if the samples do not divide by the ranks: ``"pad"``, ``"drop"`` or ``"exact"``.
        rank, world_size: which share of the samples is read.
        workers: ``"threads"``, ``"processes"``, ``"inline"`` (in the training loop), or ``"auto"``: threads for plain
            stores, otherwise by a short measurement in a process of its own.
        num_workers: threads or processes; by default one per core, at most 4 for copying, 16 for decoding pictures and
            8 for anything else. 0 is ``"inline"``.
        prefetch_factor: batches per worker that are ready or being made.
        collate: called with a list of samples instead of ``collate_samples``.
        pin_memory: page-locked batches, which a CUDA device copies by itself. Not yet run on a GPU.
        start_method: of worker processes, ``"fork"``, ``"forkserver"`` or ``"spawn"``; Python's own choice by default.

    Raises:
        LoaderError: a sample, a transform, ``collate`` or a worker failed; it names the sample.
        StoreCorruptError: a block of the store is damaged.

    Example::

        >>> import tempfile, torch
        >>> from lightning_speedkit.data import LMDBDataset, RingLoader, write_lmdb
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = write_lmdb([(torch.full((2,), i), i) for i in range(5)], f"{folder.name}/five.lmdb")
        >>> loader = RingLoader(LMDBDataset(path), batch_size=2, num_workers=1)
        >>> [labels.tolist() for _, labels in loader]
        [[0, 1], [2, 3], [4]]
        >>> loader.close()
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int = 32,
        shuffle: bool | str = False,
        seed: int = 0,
        drop_last: bool = False,
        remainder: str = "pad",
        rank: int = 0,
        world_size: int = 1,
        workers: str = "auto",
        num_workers: int | None = None,
        prefetch_factor: int = 2,
        collate: Callable[[Sequence[Any]], Any] | None = None,
        pin_memory: bool = False,
        start_method: str | None = None,
    ) -> None:
        check_workers(workers, num_workers, start_method)
        if collate is not None and not callable(collate):
            raise TypeError(f"collate must be callable or None, got {collate!r}.")
        if pin_memory and not torch.cuda.is_available():
            warnings.warn("pin_memory=True has no effect without a CUDA device.", stacklevel=2)
            pin_memory = False
        self.dataset = dataset
        self.batch_size = checked_integer("batch_size", batch_size, 1)
        self.drop_last = drop_last
        self.workers = workers
        self.num_workers = None if num_workers is None else int(num_workers)
        self.prefetch_factor = checked_integer("prefetch_factor", prefetch_factor, 1)
        self.pin_memory = pin_memory
        self.start_method = start_method
        self._collate = collate
        self.order, self._fits = choose_order(
            dataset,
            shuffle,
            batch_size=self.batch_size,
            seed=seed,
            drop_last=drop_last,
            remainder=remainder,
            rank=rank,
            world_size=world_size,
        )
        self._position = LoaderPosition()
        self._crew: Crew | None = None

    def __len__(self) -> int:
        """The batches of an epoch, of this rank."""
        return self.order.steps()

    @property
    def batch_sampler(self) -> Any:
        """Where Lightning looks for a sampler to tell the epoch; a ``sampler`` here would have to be one of torch's."""
        return SimpleNamespace(sampler=self)

    @property
    def epoch(self) -> int:
        """The epoch that is iterated now, or next."""
        return self._position.epoch

    @property
    def is_iterated(self) -> bool:
        """Whether an iteration is under way."""
        return self._crew is not None and self._crew.iteration is not None

    @property
    def worker_pids(self) -> list[int]:
        """The worker processes that are there now."""
        crew = self._crew
        return [] if crew is None or crew.process != os.getpid() else crew.pids

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; in the one that is under way, or that was resumed, stay where it is."""
        epoch = checked_integer("epoch", epoch, 0)
        if epoch != self._position.epoch:
            self._position.turn += 1  # an iteration under way counts no more
            self._position.begin(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is: after the batches that were given out. Plain numbers."""
        return self._position.state(self.order)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there: the next iteration gives the samples of that epoch which are left, also on other ranks.

        Raises:
            ValueError: the state is that of another order: other samples, seed or shuffling.
        """
        self._position.load(self.order, state)

    def __iter__(self) -> Iterator[Any]:
        if len(self.dataset) != self.order.samples:
            raise LoaderError(
                f"{type(self.dataset).__name__} has {len(self.dataset)} samples now, and had {self.order.samples} when "
                f"this loader was made: make a new loader."
            )
        position = self._position
        if position.given:  # it was left in the middle, and begins anew
            position.begin(position.epoch)
        position.turn += 1
        return self._iterate(position, position.turn)

    def close(self) -> None:
        """End the workers and free the ring, as far as no batch is in use; iterating again starts them again."""
        if self._crew is not None:
            self._crew.close()
            self._crew = None

    def __getstate__(self) -> dict[str, Any]:
        own = {"_crew": None, "_position": copy(self._position), "order": replace(self.order, _cache={})}
        return self.__dict__ | own

    def _iterate(self, position: LoaderPosition, turn: int) -> Iterator[Any]:
        tasks, crew = self._tasks(), self._crew_for_iteration()
        batches = BatchesAhead(crew, tasks)
        try:
            for step in range(tasks.steps):
                batch = batches.next()
                if turn == position.turn:
                    position.given = step + 1  # before it is given: the state is that of a loop which has got it
                yield batch
                del batch
            if turn == position.turn:
                position.begin(tasks.epoch + 1)
        finally:
            if crew.process == os.getpid():  # else a forked child lets go of what it inherited
                self._end(crew, batches)

    def _end(self, crew: Crew, batches: BatchesAhead) -> None:
        try:
            batches.drop()
        except BaseException:  # its workers may be anywhere in their tasks: they are not used again
            crew.close()
            self._crew = None if crew is self._crew else self._crew
            raise
        if crew is not self._crew:
            crew.close()

    def _crew_for_iteration(self) -> Crew:
        crew = self._crew
        if crew is not None and crew.process != os.getpid():
            crew = None  # inherited by a fork
        if crew is not None and crew.iteration is None and not is_of_use(crew, self.dataset):
            self.close()
            crew = None
        if crew is None:
            self._crew = crew = self._new_crew(self.workers)
        elif crew.iteration is not None:
            crew = self._new_crew("inline")  # a second iteration beside the first does not get workers of its own
        return crew

    def _new_crew(self, workers: str) -> Crew:
        return crew_for_dataset(
            self.dataset,
            self._collate,
            self._tasks(),
            workers=workers,
            num_workers=self.num_workers,
            prefetch_factor=self.prefetch_factor,
            pin_memory=self.pin_memory,
            start_method=self.start_method,
            fits=self._fits,
        )

    def _tasks(self) -> EpochTasks:
        position = self._position
        return EpochTasks(self.order, position.epoch, position.start, position.before)

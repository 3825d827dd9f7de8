"""Puts a crew together for a dataset: who makes the batches, how large they are, what is read ahead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning_speedkit.data.loading.batch_builder import StoreBatches, builder_for
from lightning_speedkit.data.loading.batch_task import BatchBuilder
from lightning_speedkit.data.loading.epoch_order import EpochOrder
from lightning_speedkit.data.loading.epoch_tasks import EpochTasks
from lightning_speedkit.data.loading.loader_crew import Crew
from lightning_speedkit.data.loading.read_ahead import ReadAhead
from lightning_speedkit.data.loading.shuffle_choice import is_store
from lightning_speedkit.data.loading.store_window import StoreWindow
from lightning_speedkit.data.loading.worker_choice import choose_workers
from lightning_speedkit.data.store.lmdb_dataset import LMDBDataset

__all__ = ["crew_for_dataset", "is_of_use"]

_PROBED = 4  # batches that a measurement may make


def crew_for_dataset(
    dataset: Any,
    collate: Callable[[Sequence[Any]], Any] | None,
    tasks: EpochTasks,
    *,
    workers: str,
    num_workers: int | None,
    prefetch_factor: int,
    pin_memory: bool,
    start_method: str | None,
    fits: bool,
) -> Crew:
    """A crew whose first batches are those of ``tasks``; ``fits`` is whether the store fits into memory.

    The other arguments are those of :class:`~lightning_speedkit.data.RingLoader`.
    """
    transform = _transform_of(dataset)
    order, builder = tasks.order, builder_for(dataset, collate)
    first = [tasks.task(step) for step in range(min(tasks.steps, _PROBED))]
    choice = choose_workers(builder, first, tasks.steps, kind=workers, workers=num_workers, start_method=start_method)
    crew = Crew(
        builder,
        choice,
        batch_size=min(order.batch_size, -(-order.samples // order.world_size)),
        steps=order.steps(),
        prefetch_factor=prefetch_factor,
        pin_memory=pin_memory,
        places=collate is None or pin_memory,
        start_method=start_method,
        ahead=_read_ahead(dataset, builder, order, fits),
    )
    crew.transform = transform
    return crew


def is_of_use(crew: Crew, dataset: Any) -> bool:
    """Whether the crew has workers left, and the transform that the dataset has now: set anew, it takes new ones."""
    dead = crew.choice.kind == "processes" and not crew.pids  # and no other could be started
    return not dead and crew.transform is _transform_of(dataset)


def _transform_of(dataset: Any) -> Any:
    return dataset.transform if type(dataset) is LMDBDataset else None


def _read_ahead(dataset: Any, builder: BatchBuilder, order: EpochOrder, fits: bool) -> ReadAhead | None:
    if not is_store(dataset):
        return None
    if isinstance(builder, StoreBatches):
        return ReadAhead(builder.window, order, fits=fits)
    return ReadAhead(StoreWindow(dataset.path, dataset.fingerprint), order, fits=fits)

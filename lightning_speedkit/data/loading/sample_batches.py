"""Batches of samples that a dataset makes one by one, transformed, and collated."""

from __future__ import annotations

import operator
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_speedkit.data.loading.batch_layout import Arena, stow
from lightning_speedkit.data.loading.batch_task import BatchTask, listed, message_of, seeded
from lightning_speedkit.data.loading.collate import collate_into, collate_samples
from lightning_speedkit.data.store.lmdb_dataset import LMDBDataset
from lightning_speedkit.errors import LoaderError, SpeedkitError

__all__ = ["SampleBatches"]


class SampleBatches:
    """Batches of samples that a map-style dataset makes, collated.

    Errors: a fault of a sample, a transform or ``collate`` is a :class:`LoaderError` that names the sample and has the
    traceback; its ``__cause__`` is what was raised. The kit's own errors pass as they are.
    """

    def __init__(self, dataset: Any, collate: Callable[[Sequence[Any]], Any] | None) -> None:
        self.dataset = dataset
        self._collate = None if collate is collate_samples else collate

    def slot_bytes(self, batch_size: int) -> None:
        return None

    def build(self, task: BatchTask, memory: NDArray[np.uint8] | None, randomness: str) -> tuple[Any, int]:
        with nullcontext() if randomness == "untouched" else seeded(task.key, put_back=randomness == "put back"):
            samples = self._samples(task)
            arena = Arena(memory)
            try:
                batch = collate_into(samples, arena.empty) if self._collate is None else self._collate(samples)
            except SpeedkitError:
                raise
            except Exception as error:
                raise LoaderError(f"collate failed for the samples {listed(task.samples)}: {_told(error)}") from error
        return (batch if memory is None else stow(batch, arena)), arena.wanted_bytes

    def _samples(self, task: BatchTask) -> list[Any]:
        dataset, indices = self.dataset, task.samples.tolist()
        if type(dataset) is LMDBDataset:
            seed, epoch = task.key[0], task.key[1]
            return [self._one(partial(dataset.sample, i, seed=(seed, epoch)), i) for i in indices]
        if callable(getattr(dataset, "__getitems__", None)):
            try:
                samples = dataset.__getitems__(indices)
            except SpeedkitError:
                raise
            except Exception as error:
                raise LoaderError(
                    f"{type(dataset).__name__}.__getitems__ failed for the samples {listed(task.samples)}: "
                    f"{_told(error)}"
                ) from error
            if len(samples) != len(indices):
                raise LoaderError(
                    f"{type(dataset).__name__}.__getitems__ gave {len(samples)} samples for {len(indices)} indices."
                )
            return list(samples)
        return [self._one(partial(operator.getitem, dataset, i), i) for i in indices]

    def _one(self, get: Callable[[], Any], index: int) -> Any:
        try:
            return get()
        except SpeedkitError:
            raise
        except Exception as error:
            where = self.dataset.where(index) if type(self.dataset) is LMDBDataset else type(self.dataset).__name__
            raise LoaderError(f"Sample {index} ({where}): {_told(error)}") from error


def _told(error: Exception) -> str:
    text = "".join(traceback.format_exception(error))
    return f"{type(error).__name__}: {message_of(error)}\n\n{text}"

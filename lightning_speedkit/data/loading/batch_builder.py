"""Makes the batches of a loader in the memory it is given: gathered from a store, or sample by sample.

:class:`StoreBatches` serves a plain :class:`LMDBDataset` whose fields have one shape: every field of a batch is
gathered from the map by one call, an image field is decoded into its row, and no sample is ever made as an object.
:class:`SampleBatches` serves everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_speedkit.data.loading.batch_layout import Arena
from lightning_speedkit.data.loading.batch_task import BatchBuilder, BatchTask
from lightning_speedkit.data.loading.collate import collate_samples
from lightning_speedkit.data.loading.epoch_order import Integers
from lightning_speedkit.data.loading.ring import ALIGNMENT
from lightning_speedkit.data.loading.sample_batches import SampleBatches
from lightning_speedkit.data.loading.store_window import StoreWindow
from lightning_speedkit.data.store.leaf_codec import Leaf
from lightning_speedkit.data.store.lmdb_dataset import LMDBDataset, sample_rng
from lightning_speedkit.data.store.sample_codec import Branch
from lightning_speedkit.errors import LoaderError

__all__ = ["BatchBuilder", "BatchTask", "SampleBatches", "StoreBatches", "builder_for"]


def builder_for(dataset: Any, collate: Callable[[Sequence[Any]], Any] | None) -> BatchBuilder:
    """The builder that suits a dataset."""
    if type(dataset) is LMDBDataset and dataset.transform is None and collate in (None, collate_samples):
        window = StoreWindow(dataset.path, dataset.fingerprint)
        columns = _columns(window, dataset)
        if columns is not None:
            return StoreBatches(window, columns)
    return SampleBatches(dataset, collate)


@dataclass(frozen=True, slots=True)
class _Column:
    """One field of a store in a batch. ``leaf_dtype`` is how it is stored, ``dtype`` that of the batch."""

    number: int
    place: str
    leaf: Leaf
    stored: torch.dtype | None
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    field: Any = None

    def row_bytes(self) -> int:
        """The memory of one sample in the batch; 0 for what becomes a list."""
        return 0 if self.dtype is None else int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class _Copy:
    """One field of all rows of a batch, from the map into a slot."""

    __slots__ = ("_index_bits", "_matrix", "_out", "_rows", "_start")

    def __init__(self, matrix: torch.Tensor, start: int, width: int, out: torch.Tensor, stored: torch.dtype) -> None:
        self._matrix = matrix
        self._start = start
        self._index_bits = width.bit_length() - 1
        self._out = None if out.dtype is stored else (out, stored)  # float has 64 bits in a store and 32 in a batch
        self._rows = _as_rows(out, len(out)).view(matrix.dtype) if self._out is None else None

    def into(self, places: Integers) -> None:
        """Copy the rows of the samples at these places."""
        index = torch.from_numpy((places + self._start) >> self._index_bits)
        if self._out is None:
            torch.index_select(self._matrix, 0, index, out=self._rows)
            return
        out, stored = self._out
        out.copy_(torch.index_select(self._matrix, 0, index).view(stored).view(out.shape))


@dataclass(frozen=True, slots=True)
class _Plan:
    """The copies of a batch, and the tree that describes it."""

    copies: tuple[_Copy, ...]
    tree: Any
    wanted_bytes: int


class StoreBatches:
    """Batches gathered from the map of a store.

    Errors: :class:`StoreCorruptError` for a damaged block, :class:`LoaderError` for a picture that cannot be decoded.
    """

    def __init__(self, window: StoreWindow, columns: Sequence[_Column]) -> None:
        self.window = window
        self._columns = tuple(columns)
        self._items = [column.leaf.item_bytes for column in columns]
        # samples of one size that become tensors alone: every batch of a slot is made by the same copies
        self._plain = window.index.meta["sample_bytes"] is not None and all(
            column.field is None and column.dtype is not None for column in columns
        )
        self._plans: dict[tuple[int, int], _Plan] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_plans": {}}

    @property
    def decodes(self) -> bool:
        """Whether a batch costs more than copying."""
        return any(column.field is not None for column in self._columns)

    def slot_bytes(self, batch_size: int) -> int:
        rows = (column.row_bytes() * batch_size for column in self._columns)
        return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in rows)

    def build(self, task: BatchTask, memory: NDArray[np.uint8] | None, randomness: str) -> tuple[Any, int]:
        self.window.check_unchanged()
        samples = task.samples
        places = self.window.places(samples)
        plan = self._plan(memory, len(samples)) if self._plain and memory is not None else None
        if plan is not None:
            for copy in plan.copies:
                copy.into(places)
            return plan.tree, plan.wanted_bytes
        arena = Arena(memory)
        leaves = []
        for column, item_bytes in zip(self._columns, self._items, strict=True):
            sizes = self.window.index.sizes(column.number, samples, item_bytes)
            leaves.append(self._leaf(column, task, places, sizes, arena))
            places = places + sizes
        return _assembled(self.window.index.schema.root, iter(leaves)), arena.wanted_bytes

    def _plan(self, memory: NDArray[np.uint8], count: int) -> _Plan | None:
        """Where everything goes in a batch of that size in that slot, worked out the first time."""
        key = memory.ctypes.data, count
        plan = self._plans.get(key)
        if plan is not None or self.slot_bytes(count) > len(memory):
            return plan
        arena, copies, leaves, start = Arena(memory), [], [], 0
        for column in self._columns:
            assert column.dtype is not None
            assert column.stored is not None
            out = arena.empty((count, *column.shape), column.dtype)
            leaves.append(arena.placed(out))
            row_bytes = int(np.prod(column.shape, dtype=np.int64)) * column.stored.itemsize
            if row_bytes:
                width = self.window.width_of(start, row_bytes)
                copies.append(_Copy(self.window.rows(row_bytes, width), start, width, out, column.stored))
            start += row_bytes
        tree = _assembled(self.window.index.schema.root, iter(leaves))
        plan = self._plans[key] = _Plan(tuple(copies), tree, arena.wanted_bytes)
        return plan

    def _leaf(self, column: _Column, task: BatchTask, places: Integers, sizes: Integers, arena: Arena) -> Any:
        count = len(places)
        if column.field is not None:
            return self._pictures(column, task, places, sizes, arena)
        if column.dtype is None or column.stored is None:
            data, leaf = self.window.bytes, column.leaf
            spans = zip(places.tolist(), sizes.tolist(), strict=True)
            return [leaf.decode(data[start : start + size].data, (size,)) for start, size in spans]
        out = arena.empty((count, *column.shape), column.dtype)
        row_bytes = int(sizes[0])
        if row_bytes:
            # float is stored with 64 bits and has 32 in a batch
            rows = out if column.stored is column.dtype else torch.empty(count, *column.shape, dtype=column.stored)
            self.window.gather(places, row_bytes, _as_rows(rows, count))
            if rows is not out:
                out.copy_(rows)
        return arena.placed(out) or out

    def _pictures(self, column: _Column, task: BatchTask, places: Integers, sizes: Integers, arena: Arena) -> Any:
        out = arena.empty((len(places), *column.shape), torch.uint8)
        rows, data, field = out.numpy(), self.window.bytes, column.field
        seed, epoch = task.key[0], task.key[1]
        for row, (sample, start, size) in enumerate(
            zip(task.samples.tolist(), places.tolist(), sizes.tolist(), strict=True)
        ):
            rng = sample_rng(seed, epoch, sample, column.number) if field.random else None
            try:
                field.decode_into(data[start : start + size].data, rows[row], rng)
            except Exception as error:
                where = f"block {self.window.index.place(sample)[0]} of {self.window.path}"
                raise LoaderError(f"Field {column.place or 'sample'} of sample {sample} ({where}): {error}") from error
        placed = arena.placed(out)
        return out.movedim(-1, 1) if placed is None else placed._replace(channels_last=True)


def _columns(window: StoreWindow, dataset: LMDBDataset) -> list[_Column] | None:
    """How each field is put into a batch, or ``None`` if one of them needs its samples as objects."""
    fields, columns = dataset.leaf_fields(), []
    for number, (place, leaf) in enumerate(window.index.schema.leaves()):
        shape, field = window.index.shape_of_all(number), fields.get(number)
        if field is not None:
            columns.append(_Column(number, place, leaf, torch.uint8, torch.uint8, tuple(field.shape), field))
        elif leaf.kind in ("str", "bytes", "none"):
            columns.append(_Column(number, place, leaf, None, None, ()))
        else:
            stored = _torch_dtype(leaf)
            if stored is None or shape is None:
                return None
            dtype = torch.float32 if leaf.kind == "float" else stored
            columns.append(_Column(number, place, leaf, stored, dtype, shape))
    return columns


def _torch_dtype(leaf: Leaf) -> torch.dtype | None:
    """What the stored bytes of a number, tensor or array are to torch, or ``None`` if torch has no such dtype."""
    if leaf.kind in ("int", "float", "bool"):
        return {"int": torch.int64, "float": torch.float64, "bool": torch.bool}[leaf.kind]
    if leaf.kind == "tensor":
        dtype: torch.dtype = getattr(torch, leaf.dtype)
        return dtype
    dtype_of_array = np.dtype(leaf.dtype)
    if not dtype_of_array.isnative or dtype_of_array.kind not in "biufc":
        return None
    try:
        return torch.from_numpy(np.empty(0, dtype_of_array)).dtype
    except TypeError:
        return None


def _assembled(node: Branch | Leaf, leaves: Iterator[Any]) -> Any:
    if isinstance(node, Leaf):
        return next(leaves)
    values = [_assembled(item, leaves) for item in node.items]
    if node.kind == "dict":
        return dict(zip(node.keys, values, strict=True))
    return tuple(values) if node.kind == "tuple" else values


def _as_rows(tensor: torch.Tensor, count: int) -> torch.Tensor:
    return tensor.view(torch.uint8).view(count, -1) if tensor.dim() > 1 else tensor.view(count, 1).view(torch.uint8)

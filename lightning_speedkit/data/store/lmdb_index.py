"""Where each sample lies in a store, and the shape of each of its fields.

What is the same for all samples is written once: samples of one size need no index at all, their place is computed.
Otherwise the ``index`` record holds raw little-endian arrays, each described in the ``meta`` record: the first sample
of each block, the start of each sample in its block, and the shapes of the fields whose shape varies.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_speedkit.data.store.leaf_codec import Shape
from lightning_speedkit.data.store.lmdb_format import FORMAT_VERSION
from lightning_speedkit.data.store.sample_codec import Schema
from lightning_speedkit.errors import StoreCorruptError, StoreVersionError

__all__ = ["Integers", "StoreIndex", "alignment_for", "regular_layout"]

Integers = NDArray[np.unsignedinteger[Any]]


def alignment_for(sample_bytes: int) -> int:
    """The alignment of sample starts: 64 bytes from 2 KiB on, less for smaller ones so that padding stays near 3 %.

    >>> [alignment_for(size) for size in (12, 256, 4096)]
    [1, 8, 64]
    """
    alignment = 64
    while alignment > 1 and alignment * 32 > sample_bytes:
        alignment //= 2
    return alignment


def regular_layout(sample_bytes: int, alignment: int, block_bytes: int) -> tuple[int, int]:
    """The distance of sample starts and the number of samples in a block, if all have one size."""
    stride = max(-(-sample_bytes // alignment) * alignment, 1)
    return stride, max((block_bytes - sample_bytes) // stride + 1, 1)


@dataclass(frozen=True, slots=True)
class StoreIndex:
    """Place and shapes of any sample, from the ``meta`` and the ``index`` record."""

    meta: dict[str, Any]
    schema: Schema
    samples: int
    blocks: int
    _sample_bytes: int | None
    _stride: int
    _per_block: int
    _shapes: tuple[Shape | None, ...]
    _all_shapes: tuple[Shape, ...] | None
    _arrays: dict[tuple[str, int], Integers] = field(repr=False)

    @classmethod
    def of(cls, meta_record: bytes, index_record: memoryview | bytes) -> StoreIndex:
        """Read the two records, whose checksums the caller has checked; arrays stay views of ``index_record``."""
        meta = json.loads(meta_record)
        if meta["format_version"] != FORMAT_VERSION:
            raise StoreVersionError(f"The store has format {meta['format_version']}, not {FORMAT_VERSION}.")
        arrays: dict[tuple[str, int], Integers] = {}
        for entry in meta["index"]:
            count = int(np.prod(entry["shape"], dtype=np.int64))
            values = np.frombuffer(index_record, dtype=entry["dtype"], count=count, offset=entry["offset"])
            arrays[entry["name"], entry.get("field", -1)] = values.reshape(entry["shape"])
        stride, per_block = 1, 1
        if meta["sample_bytes"] is not None:
            stride, per_block = regular_layout(meta["sample_bytes"], meta["alignment"], meta["block_bytes"])
        shapes = tuple(None if entry["shape"] is None else tuple(entry["shape"]) for entry in meta["fields"])
        known = tuple(shape for shape in shapes if shape is not None)
        return cls(
            meta=meta,
            schema=Schema.from_json(meta["schema"]),
            samples=meta["samples"],
            blocks=meta["blocks"],
            _sample_bytes=meta["sample_bytes"],
            _stride=stride,
            _per_block=per_block,
            _shapes=shapes,
            _all_shapes=known if len(known) == len(shapes) else None,
            _arrays=arrays,
        )

    def place(self, sample: int) -> tuple[int, int]:
        """The block of a sample and where it starts there."""
        if self._sample_bytes is not None:
            block, position = divmod(sample, self._per_block)
            return block, position * self._stride
        block = int(np.searchsorted(self._arrays["block_first", -1], sample, side="right")) - 1
        return block, int(self._arrays["sample_start", -1][sample])

    def places(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """:meth:`place` of many samples at once: their blocks and their starts there."""
        if self._sample_bytes is not None:
            blocks, positions = np.divmod(samples, self._per_block)
            return blocks, positions * self._stride
        blocks = np.searchsorted(self._arrays["block_first", -1], samples, side="right").astype(np.int64) - 1
        return blocks, self._arrays["sample_start", -1][samples].astype(np.int64)

    def shape_of_all(self, leaf: int) -> Shape | None:
        """The shape of a field if all samples have the same, otherwise ``None``."""
        return self._shapes[leaf]

    def sizes(self, leaf: int, samples: NDArray[np.int64], item_bytes: int) -> NDArray[np.int64]:
        """The bytes of a field in each of these samples."""
        shape = self._shapes[leaf]
        if shape is not None:
            return np.full(len(samples), item_bytes * math.prod(shape), dtype=np.int64)
        rows = self._arrays["shape", leaf][samples].astype(np.int64)
        ranks = self._arrays.get(("rank", leaf))
        if ranks is not None:  # what lies behind the rank counts as 1
            rows[np.arange(rows.shape[1]) >= ranks[samples].astype(np.int64)[:, None]] = 1
        sizes: NDArray[np.int64] = rows.prod(axis=1) * item_bytes
        return sizes

    def block_firsts(self) -> NDArray[np.int64]:
        """The first sample of each block."""
        if self._sample_bytes is not None:
            return np.arange(self.blocks, dtype=np.int64) * self._per_block
        return self._arrays["block_first", -1].astype(np.int64)

    def shapes(self, sample: int) -> tuple[Shape, ...]:
        """The shape of each field of a sample."""
        if self._all_shapes is not None:
            return self._all_shapes
        return tuple(
            shape if shape is not None else self._shape_of(leaf, sample) for leaf, shape in enumerate(self._shapes)
        )

    def size(self, shapes: tuple[Shape, ...]) -> int:
        """The bytes of a sample whose fields have these shapes."""
        if self._sample_bytes is not None:
            return self._sample_bytes
        leaves = (leaf for _, leaf in self.schema.leaves())
        return sum(leaf.byte_count(shape) for leaf, shape in zip(leaves, shapes, strict=True))

    def samples_of(self, block: int) -> range:
        """The samples of a block."""
        if self._sample_bytes is not None:
            first = block * self._per_block
            return range(first, min(first + self._per_block, self.samples))
        firsts = self._arrays["block_first", -1]
        return range(int(firsts[block]), int(firsts[block + 1]) if block + 1 < self.blocks else self.samples)

    def _shape_of(self, leaf: int, sample: int) -> Shape:
        shape: Shape = tuple(self._arrays["shape", leaf][sample].tolist())
        ranks = self._arrays.get(("rank", leaf))
        return shape if ranks is None else shape[: int(ranks[sample])]

    def check(self) -> None:
        """Raise :class:`StoreCorruptError` if the arrays do not describe ``samples`` samples."""
        for (name, leaf), values in self._arrays.items():
            expected = self.blocks if name == "block_first" else self.samples
            if len(values) != expected:
                raise StoreCorruptError(f"The index {name} {leaf} has {len(values)} rows instead of {expected}.")

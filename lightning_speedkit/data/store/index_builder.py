"""Collects place and shape of the samples while a store is written, and makes the records that describe them."""

from __future__ import annotations

import json
import struct
import zlib
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_speedkit.data.store.leaf_codec import Shape
from lightning_speedkit.data.store.lmdb_format import CRC, FORMAT_VERSION, INDEX, META
from lightning_speedkit.data.store.lmdb_index import Integers, alignment_for, regular_layout
from lightning_speedkit.data.store.sample_codec import Schema
from lightning_speedkit.version import __version__

__all__ = ["IndexBuilder"]


class IndexBuilder:
    """Decides where each sample goes and remembers it. Memory grows only with what varies from sample to sample."""

    def __init__(self, schema: Schema, sample_bytes: int, block_bytes: int) -> None:
        self.schema = schema
        self.samples = 0
        self.payload_bytes = 0
        self._block_bytes = block_bytes
        self._alignment = alignment_for(sample_bytes)
        self._next = 0  # the first free byte of the block
        self._sample_bytes: int | None = sample_bytes
        self._starts: array[int] | None = None  # only needed once the sizes vary
        self._block_first = array("Q")
        self._all_shapes: tuple[Shape, ...] | None = None  # those of the first sample, while all have the same
        self._shapes: list[_ShapeColumn] = []

    @property
    def blocks(self) -> int:
        """The blocks begun so far."""
        return len(self._block_first)

    def place(self, size: int) -> tuple[int, int]:
        """The block and the start in it for a next sample of that size; changes nothing."""
        start = -(-self._next // self._alignment) * self._alignment
        if self.samples and start + size <= self._block_bytes:
            return len(self._block_first) - 1, start
        return len(self._block_first), 0

    def add(self, size: int, shapes: tuple[Shape, ...]) -> tuple[int, int]:
        """Take a next sample; the block and the start where it goes, as :meth:`place` gives them."""
        block, start = place = self.place(size)
        if block == len(self._block_first):
            self._block_first.append(self.samples)
        if shapes != self._all_shapes:
            self._add_shapes(shapes)
        if self._sample_bytes is not None and size != self._sample_bytes:
            self._starts = self._starts_so_far(self._sample_bytes)
            self._sample_bytes = None
        if self._starts is not None:
            self._starts.append(start)
        self._next = start + (size or 1)  # also empty samples move on, so that their places can be computed
        self.samples += 1
        self.payload_bytes += size
        return place

    def finish(self, page_bytes: int) -> tuple[bytes, bytes]:
        """The ``meta`` and the ``index`` record."""
        index, directory = b"", []
        for entry, values in self._varying_arrays():
            index += bytes(-len(index) % 8)
            directory.append(entry | {"dtype": values.dtype.str, "shape": list(values.shape), "offset": len(index)})
            index += values.tobytes()
        meta = {
            "format_version": FORMAT_VERSION,
            "writer": f"lightning-speedkit {__version__}",
            "engine": "lmdb-0.9",
            "byte_order": "little",
            "page_bytes": page_bytes,
            "block_bytes": self._block_bytes,
            "samples": self.samples,
            "blocks": self.blocks,
            "payload_bytes": self.payload_bytes,
            "alignment": self._alignment,
            "sample_bytes": self._sample_bytes,
            "schema": self.schema.to_json(),
            "fields": [
                {"path": path or "sample", "codec": "raw", "shape": column.constant()}
                for (path, _), column in zip(self.schema.leaves(), self._shapes, strict=True)
            ],
            "index": directory,
        }
        return json.dumps(meta, separators=(",", ":")).encode("ascii"), index

    def records(self, page_bytes: int, crcs: Sequence[int]) -> list[tuple[bytes, bytes]]:
        """Key and value of all records but the blocks, whose CRC-32 are ``crcs``; in the order of their keys."""
        meta, index = self.finish(page_bytes)
        head = struct.pack("<QQ", self.samples, self.blocks)
        head += struct.pack(f"<{len(crcs) + 2}I", zlib.crc32(meta), zlib.crc32(index), *crcs)
        return [(CRC, head + struct.pack("<I", zlib.crc32(head))), (INDEX, index), (META, meta)]

    def _varying_arrays(self) -> list[tuple[dict[str, Any], Integers]]:
        arrays: list[tuple[dict[str, Any], Integers]] = []
        if self._starts is not None:
            arrays.append(({"name": "block_first"}, _smallest(np.array(self._block_first, dtype="<u8"))))
            arrays.append(({"name": "sample_start"}, _smallest(np.array(self._starts, dtype="<u8"))))
        for leaf, column in enumerate(self._shapes):
            if column.constant() is None:
                shapes, ranks = column.table(self.samples)
                arrays.append(({"name": "shape", "field": leaf}, _smallest(shapes)))
                if ranks is not None:
                    arrays.append(({"name": "rank", "field": leaf}, _smallest(ranks)))
        return arrays

    def _add_shapes(self, shapes: tuple[Shape, ...]) -> None:
        if not self.samples:
            self._all_shapes = shapes
            self._shapes = [_ShapeColumn(shape) for shape in shapes]
            return
        self._all_shapes = None
        for column, shape in zip(self._shapes, shapes, strict=True):
            column.add(shape, self.samples)

    def _starts_so_far(self, size: int) -> array[int]:
        """The starts of the samples before this one, which all had that size."""
        stride, per_block = regular_layout(size, self._alignment, self._block_bytes)
        return array("Q", ((sample % per_block) * stride for sample in range(self.samples)))


class _ShapeColumn:
    """The shapes of one field, kept only from the moment that one differs from the first."""

    def __init__(self, first: Shape) -> None:
        self._first = first
        self._sizes = array("Q")
        self._ranks: array[int] | None = None

    def add(self, shape: Shape, before: int) -> None:
        """The shape of a sample that has so many ``before`` it; samples of the first shape may be left out at first."""
        if self._ranks is None:
            if shape == self._first:
                return
            self._sizes = array("Q", self._first) * before
            self._ranks = array("B", [len(self._first)]) * before
        self._sizes.extend(shape)
        self._ranks.append(len(shape))

    def constant(self) -> Shape | None:
        """The shape of all, or ``None`` if they vary."""
        return self._first if self._ranks is None else None

    def table(self, count: int) -> tuple[Integers, Integers | None]:
        """One row per sample, padded with zeros to the highest rank; and the ranks, if they vary."""
        ranks = np.array(self._ranks, dtype="<u8")
        width = int(ranks.max())
        if int(ranks.min()) == width:
            return np.array(self._sizes, dtype="<u8").reshape(count, width), None
        rows = np.zeros((count, width), dtype="<u8")
        rows[np.arange(width) < ranks[:, None]] = self._sizes
        return rows, ranks


def _smallest(values: Integers) -> Integers:
    peak = int(values.max(initial=0))
    return values.astype(next(d for d in ("<u1", "<u2", "<u4", "<u8") if peak <= np.iinfo(d).max))

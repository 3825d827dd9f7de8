"""Collects place and shape of the samples while a store is written, and makes its ``meta`` and ``index`` records."""

from __future__ import annotations

import json
from array import array
from typing import Any

import numpy as np

from lightning_speedkit.data.leaf_codec import Shape
from lightning_speedkit.data.lmdb_format import FORMAT_VERSION
from lightning_speedkit.data.lmdb_index import Integers, alignment_for, regular_layout
from lightning_speedkit.data.sample_codec import Schema
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
        self._sizes = _ShapeColumn()
        self._starts: array[int] | None = None  # only needed once the sizes vary
        self._block_first = array("Q")
        self._shapes = [_ShapeColumn() for _ in schema.leaves()]

    @property
    def blocks(self) -> int:
        """The blocks begun so far."""
        return len(self._block_first)

    def place(self, size: int) -> tuple[int, int]:
        """The block and the start in it for a next sample of that size; changes nothing."""
        start = -(-self._next // self._alignment) * self._alignment
        if self.samples and start + size <= self._block_bytes:
            return self.blocks - 1, start
        return self.blocks, 0

    def add(self, size: int, shapes: tuple[Shape, ...]) -> None:
        """Take a sample at the place that :meth:`place` gave for it."""
        block, start = self.place(size)
        if block == self.blocks:
            self._block_first.append(self.samples)
        self._sizes.add((size,))
        if self._starts is None and self._sizes.constant() is None:
            self._starts = self._starts_so_far()
        if self._starts is not None:
            self._starts.append(start)
        for column, shape in zip(self._shapes, shapes, strict=True):
            column.add(shape)
        self._next = start + max(size, 1)  # also empty samples move on, so that their places can be computed
        self.samples += 1
        self.payload_bytes += size

    def finish(self, page_bytes: int) -> tuple[bytes, bytes]:
        """The ``meta`` and the ``index`` record."""
        index, directory = b"", []
        for entry, values in self._varying_arrays():
            index += bytes(-len(index) % 8)
            directory.append(entry | {"dtype": values.dtype.str, "shape": list(values.shape), "offset": len(index)})
            index += values.tobytes()
        size = self._sizes.constant()
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
            "sample_bytes": None if size is None else size[0],
            "schema": self.schema.to_json(),
            "fields": [
                {"path": path or "sample", "codec": "raw", "shape": column.constant()}
                for (path, _), column in zip(self.schema.leaves(), self._shapes, strict=True)
            ],
            "index": directory,
        }
        return json.dumps(meta, separators=(",", ":")).encode("ascii"), index

    def _varying_arrays(self) -> list[tuple[dict[str, Any], Integers]]:
        arrays: list[tuple[dict[str, Any], Integers]] = []
        if self._starts is not None:
            arrays.append(({"name": "block_first"}, _smallest(np.array(self._block_first, dtype="<u8"))))
            arrays.append(({"name": "sample_start"}, _smallest(np.array(self._starts, dtype="<u8"))))
        for leaf, column in enumerate(self._shapes):
            if column.constant() is None:
                shapes, ranks = column.table()
                arrays.append(({"name": "shape", "field": leaf}, _smallest(shapes)))
                if ranks is not None:
                    arrays.append(({"name": "rank", "field": leaf}, _smallest(ranks)))
        return arrays

    def _starts_so_far(self) -> array[int]:
        """The starts of the samples before this one, which all had the size of the first."""
        (size,) = self._sizes.first
        stride, per_block = regular_layout(size, self._alignment, self._block_bytes)
        return array("Q", ((sample % per_block) * stride for sample in range(self.samples)))


class _ShapeColumn:
    """The shapes of one field, kept only from the moment that one differs from the first."""

    def __init__(self) -> None:
        self.first: Shape = ()
        self._count = 0
        self._sizes = array("Q")
        self._ranks: array[int] | None = None

    def add(self, shape: Shape) -> None:
        if self._count == 0:
            self.first = shape
        elif self._ranks is None and shape != self.first:
            self._sizes = array("Q", self.first) * self._count
            self._ranks = array("B", [len(self.first)]) * self._count
        if self._ranks is not None:
            self._sizes.extend(shape)
            self._ranks.append(len(shape))
        self._count += 1

    def constant(self) -> Shape | None:
        """The shape of all, or ``None`` if they vary."""
        return self.first if self._ranks is None else None

    def table(self) -> tuple[Integers, Integers | None]:
        """One row per sample, padded with zeros to the highest rank; and the ranks, if they vary."""
        ranks = np.array(self._ranks, dtype="<u8")
        width = int(ranks.max())
        if int(ranks.min()) == width:
            return np.array(self._sizes, dtype="<u8").reshape(self._count, width), None
        rows = np.zeros((self._count, width), dtype="<u8")
        rows[np.arange(width) < ranks[:, None]] = self._sizes
        return rows, ranks


def _smallest(values: Integers) -> Integers:
    peak = int(values.max(initial=0))
    return values.astype(next(d for d in ("<u1", "<u2", "<u4", "<u8") if peak <= np.iinfo(d).max))

"""A store's file mapped into memory as one window, from which a whole batch is gathered by one call.

Rows of a batch lie anywhere in the file, so the map is seen as a matrix with overlapping rows: row ``a`` holds the
bytes from byte ``a`` on. ``torch.index_select`` over that matrix copies all rows of a batch in one call that releases
the GIL, into memory that is used again and again.

The map is our own, beside LMDB's: it stays valid as long as something refers to it, in a forked child too, and LMDB's
binding would touch every page of a block that is only looked up. Where the blocks lie is read from LMDB's tree, whose
pages are under the checksum of the seal.

:meth:`StoreWindow.announce` tells the kernel which blocks are read next, so that they are fetched while earlier ones
are used: a page fault in a memory map waits for its own page alone.

Source: ``posix_fadvise(2)``, ``POSIX_FADV_WILLNEED``; the kernel cuts one announcement to what the device takes in one
request, so a block is announced in pieces. ``madvise`` does the same, but Python keeps the GIL meanwhile.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_speedkit.data.loading.epoch_order import Integers
from lightning_speedkit.data.loading.ring import bytes_as_tensor
from lightning_speedkit.data.store.lmdb_format import CRC, INDEX, META, open_for_reading, read_seal
from lightning_speedkit.data.store.lmdb_index import StoreIndex
from lightning_speedkit.data.store.lmdb_pages import read_lmdb_meta, walk_tree
from lightning_speedkit.data.store.lmdb_verify import check_crc_record, damaged_block
from lightning_speedkit.errors import StoreCorruptError

__all__ = ["StoreWindow"]

_PIECE = 1 << 19
_ELEMENTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class StoreWindow:
    """The bytes of a store by their place in its file.

    Several threads may read. A process that unpickles a window maps the file anew, and raises if another store is at
    the path by then.

    Raises:
        StoreNotFoundError, StoreCorruptError, StoreVersionError: see :class:`LMDBDataset`.
    """

    def __init__(self, path: Path, fingerprint: bytes | None = None) -> None:
        self.path = path
        file = open_for_reading(path)
        try:
            self._state = _state_of(os.fstat(file))
            seal = read_seal(file, path)
            if fingerprint not in (None, seal.fingerprint):
                raise StoreCorruptError(
                    f"{path} is another store than this loader was made for: the file was replaced since. Make a new "
                    f"dataset and a new loader."
                )
            self._map = mmap.mmap(file, seal.lmdb_bytes, prot=mmap.PROT_READ)
            meta = read_lmdb_meta(file)
            assert meta is not None
            records = {record.key: record for record in walk_tree(file, meta)[1]}
        except BaseException:
            os.close(file)
            raise
        self._file = file
        self.fingerprint = seal.fingerprint
        self.file_bytes = seal.file_bytes
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        try:
            found = [records.pop(key) for key in (META, INDEX, CRC)]
        except KeyError as error:
            raise StoreCorruptError(f"{path} has no record {error}.") from None
        meta_record, index_record, crc_record = (self.bytes[slice(*record.span)].data for record in found)
        self._crcs = check_crc_record(crc_record, meta_record, index_record, path, seal)
        self.index = StoreIndex.of(bytes(meta_record), index_record)
        self.index.check()
        blocks = [records[key] for key in sorted(records)]
        if len(blocks) != self.index.blocks:
            raise StoreCorruptError(f"{path} holds {len(blocks)} blocks instead of {self.index.blocks}.")
        self._starts = np.array([record.start for record in blocks], dtype=np.int64)
        self._sizes = np.array([record.size for record in blocks], dtype=np.int64)
        self._checked = np.zeros(len(blocks), dtype=bool)
        self._flat = bytes_as_tensor(self.bytes, self.bytes)  # torch has no read-only memory; nothing writes into it
        self._matrices: dict[tuple[int, int], torch.Tensor] = {}

    def __reduce__(self) -> Any:
        return StoreWindow, (self.path, self.fingerprint)

    def __del__(self) -> None:
        file = self.__dict__.pop("_file", None)
        if file is not None:
            os.close(file)

    def check_unchanged(self) -> None:
        """Raise if other code wrote into the mapped file."""
        if _state_of(os.fstat(self._file)) != self._state:
            raise StoreCorruptError(
                f"{self.path} was changed in place while it was open, so what it holds is not known. Make a new "
                f"dataset and a new loader. To replace a store, use write_lmdb, or copy beside it and rename."
            )

    def places(self, samples: Integers) -> Integers:
        """Where each sample starts in the file; the checksum of a block is compared when it is needed first."""
        blocks, starts = self.index.places(samples)
        unchecked = blocks[~self._checked[blocks]]
        for block in dict.fromkeys(unchecked.tolist()):
            self._check(block)
        places: Integers = self._starts[blocks] + starts
        return places

    def gather(self, places: Integers, row_bytes: int, out: torch.Tensor) -> None:
        """Copy ``row_bytes`` bytes from each place into the rows of ``out``: uint8, shape ``(len(places), row_bytes)``.

        Wider elements copy faster, so the widest is taken by which places and rows can be divided.
        """
        width = _width(int(np.bitwise_or.reduce(places)) | row_bytes | out.data_ptr())
        matrix = self.rows(row_bytes, width)
        torch.index_select(matrix, 0, torch.from_numpy(places // width), out=out.view(matrix.dtype))

    def rows(self, row_bytes: int, width: int) -> torch.Tensor:
        """The file as a matrix in elements of ``width`` bytes: row ``i`` is the bytes from ``i * width`` on."""
        matrix = self._matrices.get((width, row_bytes))
        if matrix is None:
            count = (len(self.bytes) - row_bytes) // width + 1
            flat = self._flat[: len(self.bytes) // width * width].view(_ELEMENTS[width])
            matrix = flat.as_strided((count, row_bytes // width), (1, 1))
            self._matrices[width, row_bytes] = matrix
        return matrix

    def width_of(self, start: int, row_bytes: int) -> int:
        """The widest element by which all rows can be divided that begin ``start`` bytes after a sample's beginning.

        For samples of one size.
        """
        stride = self.index.place(1)[1] if self.index.samples_of(0).stop > 1 else 0
        return _width(int(np.bitwise_or.reduce(self._starts)) | stride | start | row_bytes)

    def announce(self, blocks: Integers) -> None:
        """Ask the kernel to read these blocks."""
        for start, size in zip(self._starts[blocks].tolist(), self._sizes[blocks].tolist(), strict=True):
            self._will_need(start, start + size)

    def announce_samples(self, samples: Integers) -> None:
        """Ask the kernel to read these samples alone."""
        blocks, starts = self.index.places(samples)
        for place, sample in zip((self._starts[blocks] + starts).tolist(), samples.tolist(), strict=True):
            self._will_need(place, place + self.index.size(self.index.shapes(sample)))

    def _check(self, block: int) -> None:
        start = int(self._starts[block])
        if zlib.crc32(self.bytes[start : start + int(self._sizes[block])].data) != self._crcs[block]:
            raise damaged_block(self.path, block, self.index)
        self._checked[block] = True

    def _will_need(self, first: int, last: int) -> None:
        start = first - first % mmap.PAGESIZE
        with contextlib.suppress(OSError):  # it is advice
            for piece in range(start, last, _PIECE):
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(self._file, piece, min(_PIECE, last - piece), os.POSIX_FADV_WILLNEED)
                else:
                    self._map.madvise(mmap.MADV_WILLNEED, piece, min(_PIECE, last - piece))


def _state_of(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def _width(odd: int) -> int:
    """The largest of 1, 2, 4 and 8 that divides whatever was put together by bitwise or."""
    return (odd | 8) & -(odd | 8)

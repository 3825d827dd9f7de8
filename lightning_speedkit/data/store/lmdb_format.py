"""The store format, version 1: the seal at the end of the file, and the records ``meta``, ``index`` and ``crc``.

``docs/lmdb-format.md`` specifies it for readers in any language. In short: an LMDB 0.9 file whose values are blocks of
about 1 MiB with the bytes of many samples, three records that describe them, and after the last LMDB page a seal of
our own. The seal is read first, by a plain file read: it knows the size of the file and a checksum of every page that
LMDB would walk, so a short or damaged file is an error and never a SIGBUS or SIGSEGV.

A seal at the end of the file, rather than a second file beside it, means that a store is one file, which can be moved,
copied or renamed, and that the seal cannot be separated from what it describes. LMDB ignores bytes after its last page.
"""

from __future__ import annotations

import os
import stat
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from lightning_speedkit.data.store.lmdb_pages import (
    Record,
    Span,
    crc_of_spans,
    read_exactly,
    read_lmdb_meta,
    walk_tree,
)
from lightning_speedkit.errors import (
    StoreCorruptError,
    StoreError,
    StoreNotFoundError,
    StoreVersionError,
    StoreWriteError,
)

__all__ = [
    "CRC",
    "FORMAT_VERSION",
    "INDEX",
    "META",
    "Seal",
    "block_key",
    "check_replaceable",
    "has_seal",
    "open_for_reading",
    "read_seal",
    "seal_for",
    "uncovered_spans",
]

FORMAT_VERSION = 1
META, INDEX, CRC = b"meta", b"index", b"crc"
_MAGIC = b"SPKSEAL\n"
_FOOTER = struct.Struct("<8sIIQQQQQIIIII52x")
_RUN = struct.Struct("<QQ")


@dataclass(frozen=True, slots=True)
class Seal:
    """What is known of a store before LMDB opens it.

    ``tree_runs`` are the pages that LMDB walks, as (first page, number of pages); ``tree_crc`` is the CRC-32 of those
    pages, ``rest_crc`` of all bytes that are neither tree nor the value of a record. ``record_crc`` is the checksum
    at the end of the ``crc`` record, which covers all other records. ``fingerprint`` is the footer itself: two stores
    with different content have different ones, as far as checksums tell them apart.
    """

    version: int
    file_bytes: int
    lmdb_bytes: int
    samples: int
    blocks: int
    page_bytes: int
    tree_runs: tuple[tuple[int, int], ...]
    tree_crc: int
    rest_crc: int
    record_crc: int
    fingerprint: bytes = b""

    def tree_spans(self) -> list[Span]:
        """The pages that LMDB walks, as parts of the file."""
        return [(first * self.page_bytes, (first + count) * self.page_bytes) for first, count in self.tree_runs]

    def to_bytes(self) -> bytes:
        """The bytes that follow the last LMDB page: the runs of tree pages, then the footer of 128 bytes."""
        runs = b"".join(_RUN.pack(*run) for run in self.tree_runs)

        def footer(own_crc: int) -> bytes:
            return _FOOTER.pack(
                _MAGIC, self.version, own_crc, self.file_bytes, self.lmdb_bytes, len(self.tree_runs), self.samples,
                self.blocks, self.page_bytes, zlib.crc32(runs), self.tree_crc, self.rest_crc, self.record_crc,
            )  # fmt: skip

        return runs + footer(zlib.crc32(footer(0)))


def block_key(block: int) -> bytes:
    """The key of a block: its number as an unsigned 64-bit integer, big-endian."""
    return block.to_bytes(8, "big")


def seal_for(file: int) -> Seal:
    """The seal of a finished LMDB file that has none yet. The file is closed in LMDB and synced."""
    meta = read_lmdb_meta(file)
    assert meta is not None
    pages, records = walk_tree(file, meta)
    by_key = {record.key: record for record in records}
    runs = _runs(sorted([0, 1, *pages]))
    used = max(os.fstat(file).st_size, (meta.last_page + 1) * meta.page_bytes)
    lmdb_bytes = -(-used // meta.page_bytes) * meta.page_bytes
    os.ftruncate(file, lmdb_bytes)
    spans = [(first * meta.page_bytes, (first + count) * meta.page_bytes) for first, count in runs]
    crc_record = by_key[CRC]
    samples, blocks = struct.unpack("<QQ", read_exactly(file, crc_record.start, 16))
    return Seal(
        version=FORMAT_VERSION,
        file_bytes=lmdb_bytes + len(runs) * _RUN.size + _FOOTER.size,
        lmdb_bytes=lmdb_bytes,
        samples=samples,
        blocks=blocks,
        page_bytes=meta.page_bytes,
        tree_runs=tuple(runs),
        tree_crc=crc_of_spans(file, spans),
        rest_crc=crc_of_spans(file, uncovered_spans(spans, records, lmdb_bytes)),
        # Without its last 4 bytes: the CRC of bytes that end in their own CRC is the same number for all.
        record_crc=crc_of_spans(file, [(crc_record.start, crc_record.span[1] - 4)]),
    )


def uncovered_spans(tree: list[Span], records: list[Record], end: int) -> list[Span]:
    """All parts of the file before ``end`` that are neither in ``tree`` nor the value of a record."""
    spans, position = [], 0
    for first, last in sorted([*tree, *(record.span for record in records)]):
        if first > position:
            spans.append((position, first))
        position = max(position, last)
    if position < end:
        spans.append((position, end))
    return spans


def read_seal(file: int, path: Path) -> Seal:
    """The seal of an open file, after all checks that need no map: size, version, and the CRC of the tree pages.

    Raises:
        StoreCorruptError: empty, not a store, truncated, or damaged in the pages that LMDB walks.
        StoreVersionError: written in a newer format.
    """
    size = os.fstat(file).st_size
    if size == 0:
        raise StoreCorruptError(f"{path} is empty (0 bytes).")
    footer = os.pread(file, _FOOTER.size, max(size - _FOOTER.size, 0))
    if len(footer) < _FOOTER.size or footer[:8] != _MAGIC:
        raise StoreCorruptError(_why_no_seal(file, path, size))
    (_, version, crc, file_bytes, lmdb_bytes, run_count, samples, blocks, page_bytes, runs_crc, tree_crc, rest_crc,
     record_crc) = _FOOTER.unpack(footer)  # fmt: skip
    if zlib.crc32(footer[:12] + bytes(4) + footer[16:]) != crc:
        raise StoreCorruptError(f"{path}: the checksum of the seal does not match; the file is damaged.")
    if version != FORMAT_VERSION:
        raise StoreVersionError(
            f"{path} is written in store format {version}; this version of lightning-speedkit reads format "
            f"{FORMAT_VERSION}. Install a version that reads format {version}, or write the store again."
        )
    if file_bytes != size:
        raise StoreCorruptError(f"{path} has {size} bytes; it was written with {file_bytes}.")
    runs = read_exactly(file, lmdb_bytes, run_count * _RUN.size)
    seal = Seal(
        version, file_bytes, lmdb_bytes, samples, blocks, page_bytes, tuple(_RUN.iter_unpack(runs)), tree_crc,
        rest_crc, record_crc, footer,
    )  # fmt: skip
    if zlib.crc32(runs) != runs_crc or crc_of_spans(file, seal.tree_spans()) != tree_crc:
        raise StoreCorruptError(f"{path}: the checksum of LMDB's own pages does not match; the file is damaged.")
    return seal


def open_for_reading(path: Path) -> int:
    """A file descriptor of the store.

    Raises:
        StoreNotFoundError: there is no file.
        StoreCorruptError: it is not a regular file.
        StoreError: the system cannot open it.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not block
    except (FileNotFoundError, NotADirectoryError):
        raise StoreNotFoundError(f"There is no store at {path}.") from None
    except OSError as error:
        raise StoreError(f"{path} cannot be opened: {error.strerror}.") from error
    mode = os.fstat(file).st_mode
    if not stat.S_ISREG(mode):
        os.close(file)
        what = "a folder" if stat.S_ISDIR(mode) else "a pipe, socket or device"
        raise StoreCorruptError(f"{path} is {what}; a store is one file, as write_lmdb or LMDBWriter writes it.")
    return file


def check_replaceable(path: Path) -> None:
    """Raise :class:`StoreWriteError` if something is at the path that is neither a store nor an empty file.

    The path is free of symbolic links, but for a link that leads to itself.
    """
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return
    if stat.S_ISDIR(status.st_mode):
        raise StoreWriteError(f"{path} is a folder; give the name of a file, such as train.lmdb.")
    if not stat.S_ISREG(status.st_mode):
        raise StoreWriteError(f"{path} is not a regular file and is not replaced; give another path.")
    if status.st_size and not has_seal(path):
        raise StoreWriteError(
            f"{path} is not replaced: it has no seal of a store at its end, so it is a file of another kind or a "
            f"store that was cut short. Remove it first, or give another path."
        )


def has_seal(path: Path) -> bool:
    """Whether a file ends as a store does, whole or damaged."""
    with path.open("rb") as file:
        start = max(os.fstat(file.fileno()).st_size - _FOOTER.size, 0)
        return os.pread(file.fileno(), len(_MAGIC), start) == _MAGIC


def _why_no_seal(file: int, path: Path, size: int) -> str:
    meta = read_lmdb_meta(file)
    if meta is None:
        return f"{path} is not an LMDB file, or its first page is damaged."
    needed = (meta.last_page + 1) * meta.page_bytes
    if size < needed:
        return f"{path} is truncated: it has {size} bytes, its LMDB pages alone need {needed}. Copy or write it again."
    return (
        f"{path} is an LMDB file without the seal that write_lmdb puts at its end: it lost its last bytes, was "
        f"changed or compacted by another program, or was not written by lightning-speedkit. Write it again."
    )


def _runs(pages: list[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for page in pages:
        if runs and sum(runs[-1]) == page:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return runs

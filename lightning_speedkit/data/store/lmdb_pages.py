"""Reads the pages of an LMDB 0.9 file by plain file reads, without LMDB and without a memory map.

A store needs this twice: the writer, to know which pages hold LMDB's tree and where each record lies, so that all of
them can be put under checksums; and :func:`~lightning_speedkit.data.verify_lmdb`, to read records without a map that a
short file would turn into a SIGBUS. Source: ``mdb.c`` of LMDB 0.9 (``MDB_page``, ``MDB_meta``, ``MDB_node``); the
layout is that of a 64-bit little-endian machine.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lightning_speedkit.errors import StoreCorruptError

__all__ = ["LmdbMeta", "Record", "Span", "crc_of_spans", "read_exactly", "read_lmdb_meta", "walk_tree"]

Span = tuple[int, int]
"""First byte and the byte after the last."""

MAGIC = 0xBEEFC0DE
PAGE_HEADER = struct.Struct("<QHHHH")  # page number, pad, flags, lower, upper
META = struct.Struct("<IIQQ")  # magic, version, address, map size; the two 48-byte database records follow
DATABASE = struct.Struct("<IHHQQQQQ")  # pad, flags, depth, branch, leaf and overflow pages, entries, root
NODE = struct.Struct("<HHHH")  # low and high half of the size or page number, flags, key size
BRANCH_PAGE, LEAF_PAGE, META_PAGE = 0x01, 0x02, 0x08
BIG_DATA = 0x01
NO_ROOT = 2**64 - 1
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class LmdbMeta:
    """What the newer of the two meta pages says."""

    page_bytes: int
    root: int
    depth: int
    entries: int
    last_page: int


@dataclass(frozen=True, slots=True)
class Record:
    """One key with the place of its value in the file."""

    key: bytes
    start: int
    size: int

    @property
    def span(self) -> Span:
        """The bytes of the value."""
        return self.start, self.start + self.size


def read_exactly(file: int, start: int, size: int) -> bytes:
    """``size`` bytes of an open file from ``start``; :class:`StoreCorruptError` if the file is shorter."""
    parts = []
    while size > 0:
        part = os.pread(file, min(size, 1 << 30), start)
        if not part:
            raise StoreCorruptError(f"The file ends at byte {start}, {size} bytes too early.")
        parts.append(part)
        start, size = start + len(part), size - len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def crc_of_spans(file: int, spans: Iterable[Span]) -> int:
    """The CRC-32 of these parts of the file, one after the other."""
    crc = 0
    for first, end in spans:
        for start in range(first, end, _CHUNK):
            crc = zlib.crc32(read_exactly(file, start, min(_CHUNK, end - start)), crc)
    return crc


def read_lmdb_meta(file: int) -> LmdbMeta | None:
    """The newer of the two meta pages, or ``None`` if this is not an LMDB 0.9 file."""
    head = os.pread(file, 4096, 0)
    first = _meta_at(head)
    if first is None:
        return None
    second = _meta_at(os.pread(file, 4096, first[1].page_bytes))
    if second is None:
        return first[1]
    return max(first, second, key=lambda pair: pair[0])[1]


def walk_tree(file: int, meta: LmdbMeta) -> tuple[list[int], list[Record]]:
    """The page numbers of the main tree, and all records in the order of their keys.

    Trusts the pages: whoever reads a file that was not written a moment ago checks their CRC first.
    """
    pages: list[int] = []
    records: list[Record] = []
    waiting = [] if meta.root == NO_ROOT else [meta.root]
    while waiting:
        number = waiting.pop()
        page = read_exactly(file, number * meta.page_bytes, meta.page_bytes)
        found, _, flags, lower, _ = PAGE_HEADER.unpack_from(page)
        if found != number or not flags & (BRANCH_PAGE | LEAF_PAGE) or len(pages) > meta.last_page:
            raise StoreCorruptError(f"Page {number} of the file is not the tree page it should be.")
        pages.append(number)
        nodes = list(_nodes(page, lower))
        if flags & LEAF_PAGE:
            base = number * meta.page_bytes
            records.extend(_record(page, base, node, meta.page_bytes) for node in nodes)
        else:
            children = [low | high << 16 | node_flags << 32 for _, (low, high, node_flags, _) in nodes]
            waiting.extend(reversed(children))
    return pages, records


def _meta_at(page: bytes) -> tuple[int, LmdbMeta] | None:
    if len(page) < PAGE_HEADER.size + META.size + 2 * DATABASE.size + 16:
        return None
    flags = PAGE_HEADER.unpack_from(page)[2]
    magic, version, _, _ = META.unpack_from(page, PAGE_HEADER.size)
    if not flags & META_PAGE or magic != MAGIC or version != 1:
        return None
    start = PAGE_HEADER.size + META.size
    page_bytes = DATABASE.unpack_from(page, start)[0]  # the free list's pad field holds the page size
    _, _, depth, _, _, _, entries, root = DATABASE.unpack_from(page, start + DATABASE.size)
    last_page, transaction = struct.unpack_from("<QQ", page, start + 2 * DATABASE.size)
    return transaction, LmdbMeta(page_bytes, root, depth, entries, last_page)


def _nodes(page: bytes, lower: int) -> Iterator[tuple[int, tuple[int, int, int, int]]]:
    for slot in range(PAGE_HEADER.size, lower, 2):
        offset = int.from_bytes(page[slot : slot + 2], "little")
        yield offset, NODE.unpack_from(page, offset)


def _record(page: bytes, base: int, node: tuple[int, tuple[int, int, int, int]], page_bytes: int) -> Record:
    offset, (low, high, flags, key_size) = node
    key = page[offset + NODE.size : offset + NODE.size + key_size]
    data = offset + NODE.size + key_size
    size = low | high << 16
    if flags & BIG_DATA:
        overflow_page = int.from_bytes(page[data : data + 8], "little")
        return Record(key, overflow_page * page_bytes + PAGE_HEADER.size, size)
    return Record(key, base + data, size)

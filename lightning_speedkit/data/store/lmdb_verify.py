"""Checks every byte of a store, that its samples can be read, and says what it holds.

Each byte of the file is covered by one checksum: the pages of LMDB's tree, the records ``meta``, ``index`` and
``crc``, each block, and all that is left over. Nothing is mapped into memory, so a damaged file cannot end the process.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from lightning_speedkit.data.store.lmdb_format import (
    CRC,
    INDEX,
    META,
    Seal,
    block_key,
    open_for_reading,
    read_seal,
    uncovered_spans,
)
from lightning_speedkit.data.store.lmdb_index import StoreIndex
from lightning_speedkit.data.store.lmdb_pages import Record, crc_of_spans, read_exactly, read_lmdb_meta, walk_tree
from lightning_speedkit.errors import StoreCorruptError

__all__ = ["StoreReport", "check_crc_record", "damaged_block", "verify_lmdb"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReport:
    """What :func:`verify_lmdb` found; all checksums match.

    ``payload_bytes`` are the bytes of the samples alone, ``file_bytes`` the size of the file. ``schema`` is the
    structure of a sample, ``fields`` one line per field with its path, type and shape (``varies`` if it does).
    """

    path: Path
    format_version: int
    writer: str
    samples: int
    blocks: int
    block_bytes: int
    payload_bytes: int
    file_bytes: int
    fields: tuple[str, ...]


def verify_lmdb(path: str | os.PathLike[str]) -> StoreReport:
    """Read the whole store, compare all checksums, and decode the first sample of each block.

    Raises:
        StoreNotFoundError: there is no file at that path.
        StoreCorruptError: empty, not a store, truncated, or a byte has changed; a damaged block is named with its
            samples.
        StoreVersionError: written in a newer format than this version reads.

    Example::

        >>> import tempfile
        >>> from lightning_speedkit.data import verify_lmdb, write_lmdb
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = write_lmdb([(i, float(i)) for i in range(1000)], f"{folder.name}/numbers.lmdb")
        >>> report = verify_lmdb(path)
        >>> report.samples, report.payload_bytes, report.fields
        (1000, 16000, ('[0]: int', '[1]: float'))
    """
    path = Path(path).expanduser().absolute()
    file = open_for_reading(path)
    try:
        seal = read_seal(file, path)
        records = _records(file, path)
        index, crcs = _described(file, path, seal, records)
        for block in range(seal.blocks):
            if crc_of_spans(file, [records[block_key(block)].span]) != crcs[block]:
                raise damaged_block(path, block, index)
            _decode_first(file, path, records[block_key(block)], index, block)
        rest = uncovered_spans(seal.tree_spans(), list(records.values()), seal.lmdb_bytes)
        if crc_of_spans(file, rest) != seal.rest_crc:
            raise StoreCorruptError(f"{path}: bytes between the records have changed; the samples are intact.")
    finally:
        os.close(file)
    return _report(path, seal, index)


def check_crc_record(record: bytes | memoryview, meta: bytes | memoryview, index: bytes | memoryview, path: Path,
                     seal: Seal) -> tuple[int, ...]:  # fmt: skip
    """The CRC-32 of each block, after those of ``meta``, ``index`` and of the record itself have been checked."""
    if zlib.crc32(record[:-4]) != seal.record_crc or record[-4:] != seal.record_crc.to_bytes(4, "little"):
        raise StoreCorruptError(f"{path}: the checksum of the record 'crc' does not match; the file is damaged.")
    meta_crc, index_crc, *blocks = struct.unpack_from(f"<{seal.blocks + 2}I", record, 16)
    for name, data, crc in (("meta", meta, meta_crc), ("index", index, index_crc)):
        if zlib.crc32(data) != crc:
            raise StoreCorruptError(f"{path}: the checksum of the record {name!r} does not match; it is damaged.")
    return tuple(blocks)


def damaged_block(path: Path, block: int, index: StoreIndex) -> StoreCorruptError:
    """The error for a block whose checksum does not match."""
    samples = index.samples_of(block)
    return StoreCorruptError(
        f"{path}: the checksum of block {block} does not match; samples {samples.start} to {samples.stop - 1} are "
        f"damaged. Copy or write the store again."
    )


def _records(file: int, path: Path) -> dict[bytes, Record]:
    meta = read_lmdb_meta(file)
    if meta is None:
        raise StoreCorruptError(f"{path} is not an LMDB file.")
    return {record.key: record for record in walk_tree(file, meta)[1]}


def _described(file: int, path: Path, seal: Seal, records: dict[bytes, Record]) -> tuple[StoreIndex, tuple[int, ...]]:
    expected = {META, INDEX, CRC, *(block_key(block) for block in range(seal.blocks))}
    if records.keys() != expected:
        raise StoreCorruptError(f"{path} has other records than its seal names.")
    meta, index, crc = (read_exactly(file, records[key].start, records[key].size) for key in (META, INDEX, CRC))
    crcs = check_crc_record(crc, meta, index, path, seal)
    try:
        described = StoreIndex.of(meta, index)
        described.check()
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise StoreCorruptError(f"{path}: its description of the samples cannot be read: {error}") from error
    return described, crcs


def _decode_first(file: int, path: Path, record: Record, index: StoreIndex, block: int) -> None:
    """Checksums say that the bytes are those that were written; this says that they are a sample."""
    first = index.samples_of(block).start
    try:
        shapes = index.shapes(first)
        start, size = index.place(first)[1], index.size(shapes)
        if start + size > record.size:
            raise StoreCorruptError(f"it ends outside of its block {block}")
        index.schema.decode(read_exactly(file, record.start + start, size), shapes)
    except Exception as error:
        raise StoreCorruptError(
            f"{path}: every checksum matches, but sample {first} cannot be read: {error}"
        ) from error


def _report(path: Path, seal: Seal, index: StoreIndex) -> StoreReport:
    fields = []
    for (place, leaf), entry in zip(index.schema.leaves(), index.meta["fields"], strict=True):
        shape = "" if entry["shape"] == [] else f" {'varies' if entry['shape'] is None else tuple(entry['shape'])}"
        fields.append(f"{place or 'sample'}: {' '.join(filter(None, (leaf.kind, leaf.dtype)))}{shape}")
    return StoreReport(
        path=path,
        format_version=seal.version,
        writer=index.meta["writer"],
        samples=seal.samples,
        blocks=seal.blocks,
        block_bytes=index.meta["block_bytes"],
        payload_bytes=index.meta["payload_bytes"],
        file_bytes=seal.file_bytes,
        fields=tuple(fields),
    )

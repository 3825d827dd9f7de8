"""``.npy`` and ``.npz`` files: arrays whose first axis counts the samples.

A ``.npy`` file is mapped, and a sample is one row of it. A ``.npz`` file is read row by row from all its arrays at
once, and a sample is a dict with one row of each. Neither is held in memory as a whole, but for compressed arrays in
Fortran order, whose rows do not lie together. The checksum of an array in a ``.npz`` file covers all its rows, so a
damaged one is an error of the file and not of a row, and may come after the last row. Rows keep their dtype, in the
byte order of this machine; text of a one-dimensional array is ``str`` or ``bytes``.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np

from lightning_speedkit.data.sources.columns import Columns, chosen
from lightning_speedkit.data.sources.source import Item, Source, held_item
from lightning_speedkit.errors import SourceError

__all__ = ["NumpyFile", "NumpyZip"]

_KINDS = "biufcMmSU"
_format: Any = np.lib.format  # which NumPy has types for from 2.3 on
_REST_BYTES = 1 << 20
_FAULTS = (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, NotImplementedError)


class NumpyFile(Source):
    """The rows of the array in a ``.npy`` file.

    Raises:
        SourceError: not such a file, cut short, without a first axis, or of a dtype that only pickle restores.
    """

    format = "npy"

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise SourceError(f"{path} cannot be read as a .npy file: {error}.") from error
        if not isinstance(self._array, np.ndarray):
            raise SourceError(f"{path} is a .npz file: give it that suffix, or --format npz.")
        _check(str(path), self._array.dtype, self._array.shape)

    def __len__(self) -> int:
        return len(self._array)

    def items(self) -> Iterator[Item]:
        """One item per row."""
        dtype = self._array.dtype.newbyteorder("=")
        for row in range(len(self)):
            yield Item(f"{self.path} row {row}", _row_of(self._array, row, dtype))


class NumpyZip(Source):
    """The rows of the arrays in a ``.npz`` file, as dicts.

    Args:
        path: the file.
        columns: the arrays to read; by default all of them.

    Raises:
        SourceError: not such a file, arrays of different lengths, or a dtype that only pickle restores.
    """

    format = "npz"

    def __init__(self, path: Path, *, columns: Columns | None = None) -> None:
        self.path = path
        try:
            with zipfile.ZipFile(path) as archive:
                names = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
                self._names = list(chosen(columns, names, str(path)))
                lengths = {name: self._length(archive, name) for name in self._names}
        except _FAULTS as error:
            if isinstance(error, SourceError):
                raise
            raise SourceError(f"{path} cannot be read as a .npz file: {error}.") from error
        if len(set(lengths.values())) != 1:
            counts = ", ".join(f"{name} {length}" for name, length in lengths.items()) or "no array"
            raise SourceError(
                f"{path} has arrays of different lengths ({counts}), so their rows are not samples together: choose "
                f"some of them with --columns."
            )
        self._count = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self._count

    def items(self) -> Iterator[Item]:
        """One item per row. They must be asked for in turn; each one holds its own memory.

        Raises:
            SourceError: the file is damaged, which the last row may be the first to show: no row of it can be trusted.
        """
        return self.limited(self._count)

    def limited(self, count: int) -> Iterator[Item]:
        """The first rows. The arrays are read to their ends all the same, since that is where a checksum is."""
        row = 0
        with ExitStack() as files:
            try:
                archive = files.enter_context(zipfile.ZipFile(self.path))
                members = {name: files.enter_context(archive.open(f"{name}.npy")) for name in self._names}
                columns = [(name, self._rows(file, name)) for name, file in members.items()]
                for row in range(min(count, self._count)):
                    sample = {name: take() for name, take in columns}
                    yield held_item(f"{self.path} row {row}", sample)
                for file in members.values():
                    while file.read(_REST_BYTES):
                        pass
            except _FAULTS as error:
                if isinstance(error, SourceError):
                    raise
                raise SourceError(
                    f"{self.path} row {row}: the file is damaged here or before ({error}), and which of its rows are "
                    f"right cannot be told. Write it again, or get another copy."
                ) from error

    def _length(self, archive: zipfile.ZipFile, name: str) -> int:
        with archive.open(f"{name}.npy") as file:
            shape, _, dtype = _header(file)
        _check(f"{self.path} array {name!r}", dtype, shape)
        return shape[0]

    def _rows(self, file: IO[bytes], name: str) -> Callable[[], Any]:
        shape, fortran, dtype = _header(file)
        if fortran and len(shape) > 1:
            file.seek(0)
            whole = iter(_format.read_array(file, allow_pickle=False).astype(dtype.newbyteorder("=")))
            return lambda: _plain(next(whole))
        size = int(np.prod(shape[1:])) * dtype.itemsize

        def take() -> Any:
            data = file.read(size)
            if len(data) != size:
                raise EOFError(f"the array {name!r} ends too early")
            row = np.frombuffer(data, dtype).reshape(shape[1:])
            return _plain(row.astype(dtype.newbyteorder("="), copy=False)[()])

        return take


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    reads = _format.read_array_header_1_0 if _format.read_magic(file) == (1, 0) else _format.read_array_header_2_0
    header: tuple[tuple[int, ...], bool, np.dtype[Any]] = reads(file)
    return header


def _check(where: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    if not shape:
        raise SourceError(f"{where} is a single value: the first axis of an array counts the samples.")
    if dtype.kind not in _KINDS:
        what = "Python objects, which only pickle restores" if dtype.hasobject else f"records of dtype {dtype}"
        raise SourceError(f"{where} holds {what}: save plain arrays, one per field, in a .npz file.")


def _row_of(array: Any, row: int, dtype: np.dtype[Any]) -> Callable[[], Any]:
    return lambda: _plain(np.asarray(array[row]).astype(dtype, copy=False)[()])


def _plain(value: Any) -> Any:
    """Text of a one-dimensional array as ``str`` or ``bytes``; NumPy's scalars of it are not stored."""
    return value.item() if isinstance(value, np.str_ | np.bytes_) else value

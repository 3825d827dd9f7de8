"""What is staged: the files behind a path, what tells their versions apart, and how their bytes are read.

A folder stands for the stores (``*.lmdb``) in it. The names of the classes of a store, which lie beside it in a small
file, go with it. What lies behind an address such as ``s3://bucket/train.lmdb`` is found by
:mod:`lightning_speedkit.data.staging.remote_source`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_speedkit.data.sources.class_names import classes_path
from lightning_speedkit.errors import StagingError

__all__ = ["Source", "SourceFile", "address_of", "check_source", "find_local", "is_address", "name_of", "source_id",
           "without_query"]  # fmt: skip

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://|::[A-Za-z][A-Za-z0-9+.-]*://)")
_LOCAL = re.compile(r"(file|local)://(?=/)")
_TAIL_BYTES = 1 << 12
_STREAM_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file to copy. ``size`` is ``None`` if the server does not tell it.

    ``read(start, size)`` returns bytes from any place, and ``None`` stands for a server that only sends whole files;
    ``stream()`` yields the file from its first byte on. ``readers`` is how many reads at once serve it best.
    """

    name: str
    size: int | None
    version: Mapping[str, Any]
    read: Callable[[int, int], bytes] | None
    stream: Callable[[], Iterator[bytes]]
    readers: int = 2


@dataclass(frozen=True, slots=True)
class Source:
    """All files behind what the user named: stores, or one file, and after them the names of their classes.

    ``shown`` is the address without what may be secret in it.
    """

    address: str
    shown: str
    is_folder: bool
    files: tuple[SourceFile, ...]

    @property
    def source_id(self) -> str:
        """The same for all versions of one source."""
        return source_id(self.address)

    @property
    def identity(self) -> str:
        """Another one for another source, and for another version of the same."""
        files = [[file.name, file.size, dict(file.version)] for file in self.files]
        return _digest(json.dumps([self.address, files], sort_keys=True, default=str))

    @property
    def name(self) -> str:
        """The last part of the address."""
        return name_of(self.address) if self.is_folder else self.files[0].name

    @property
    def key(self) -> str:
        """The name of the folder of its copy."""
        short = self.name.encode("utf-8", "replace")[:80].decode("utf-8", "ignore")
        return f"{short}-{self.identity}"

    @property
    def bytes(self) -> int | None:
        """Of all files together; ``None`` if one of them is not known."""
        sizes = [file.size for file in self.files]
        return None if None in sizes else sum(size for size in sizes if size is not None)


def is_address(source: str | os.PathLike[str]) -> bool:
    """Whether it is for fsspec; everything else is a path.

    >>> [is_address(text) for text in ("s3://a/b", "zip://x::http://a/b", "data/a.lmdb", "file:///a", "a:b")]
    [True, True, False, False, False]
    """
    return isinstance(source, str) and _ADDRESS.match(source) is not None and _LOCAL.match(source) is None


def address_of(source: str | os.PathLike[str]) -> str:
    """The address as it is, or the absolute path; symbolic links are kept, so that a link may be set to a new version.

    >>> address_of("file:///data/../a.lmdb"), address_of("memory://x")
    ('/a.lmdb', 'memory://x')
    """
    if not isinstance(source, str | os.PathLike):
        raise TypeError(f"source must be a path or an address as text, got {source!r}.")
    if is_address(source):  # "s3://b/sets/" is "s3://b/sets"; on the web the two may differ
        return str(source) if re.match(r"https?://|.*://$", str(source)) else str(source).rstrip("/")
    text = os.fspath(source)
    if not isinstance(text, str):
        raise TypeError(f"source must be a path of str, got {text!r}.")
    if not isinstance(source, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/[^/]", text) and not os.path.lexists(text):
        raise ValueError(f"source={source!r}: a Path turns // into /, so give an address as text, such as 's3://...'.")
    if not text:
        raise ValueError("source is empty; give a path or an address.")
    return os.path.abspath(os.path.expanduser(_LOCAL.sub("", text)))  # noqa: PTH100, PTH111  # Path keeps ".."


def source_id(address: str) -> str:
    """A name for the address that does not tell it."""
    return _digest(address)


def find_local(path: str) -> Source:
    """Look at what is there now; nothing is read but the end of each file.

    Raises:
        ConnectionError: it cannot be reached, so that nothing is known about it.
        StagingError: it is not there, may not be read, or is a folder without stores.
    """
    try:
        folder = stat.S_ISDIR(Path(path).stat().st_mode)
        paths = [Path(path)]
        if folder:
            paths = sorted(p for p in Path(path).glob("*.lmdb") if p.is_file() and not p.name.startswith("."))
        files = [_local_file(one) for one in paths]
        files += [names for names in map(_class_names, paths) if names is not None]
    except (FileNotFoundError, NotADirectoryError):
        raise StagingError(f"There is nothing at {path} to be staged.") from None
    except PermissionError as error:
        raise StagingError(f"{path} may not be read by this user ({error}).") from error
    except StagingError:
        raise
    except OSError as error:
        raise ConnectionError(f"{path} cannot be reached: {error.strerror or error}") from error
    return check_source(Source(path, path, folder, tuple(files)))


def check_source(source: Source) -> Source:
    """The source, if it has files, and names that a copy can have; :class:`StagingError` otherwise."""
    if not source.files:
        raise StagingError(f"The folder {source.shown} holds no *.lmdb file to be staged.")
    for file in source.files:
        if not file.name or file.name.startswith(".") or "/" in file.name or "\0" in file.name:
            raise StagingError(f"{source.shown} does not end in the name of a file (got {file.name!r}).")
    return source


def _class_names(store: Path) -> SourceFile | None:
    """The file with the names of the classes of a store, if it has one."""
    names = classes_path(store)
    try:
        return _local_file(names) if stat.S_ISREG(names.stat().st_mode) else None
    except PermissionError as error:
        raise StagingError(f"{names} may not be read by this user ({error}).") from error
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
            return None
        raise


def _local_file(path: Path) -> SourceFile:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not block
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise StagingError(f"{path} is neither a file nor a folder, so it cannot be staged.")
        tail = os.pread(file, _TAIL_BYTES, max(0, status.st_size - _TAIL_BYTES))
    finally:
        os.close(file)

    def read(start: int, size: int) -> bytes:
        with path.open("rb", buffering=0) as stream:
            return os.pread(stream.fileno(), size, start)

    def stream() -> Iterator[bytes]:
        with path.open("rb", buffering=0) as opened:
            while data := opened.read(_STREAM_BYTES):
                yield data

    # The seal of a store is in its tail: another content has another one, also where the clock of a file is coarse.
    version = {"mtime_ns": status.st_mtime_ns, "tail": zlib.crc32(tail)}
    return SourceFile(path.name, status.st_size, version, read, stream)


def name_of(address: str) -> str:
    """The last part of a path or an address; of a chain, such as ``zip://a.lmdb::s3://b/c.zip``, that of its first."""
    first = next((part for part in address.split("::") if "://" in part), address)
    path = re.sub(r"^https?://[^/]*", "", without_query(first))  # elsewhere the first part may be the name of a file
    return path.rstrip("/").rpartition("/")[2]


def without_query(address: str) -> str:
    """A web address without what follows its path, which may hold a signature; any other one as it is."""
    return re.sub(r"(?<=://)([^?#]*).*", r"\1", address) if re.match(r"https?://", address) else address


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]

"""WebDataset shards: ``.tar`` files in which the files of a sample lie together, named alike up to the first dot.

A sample is a dict by extension, such as ``{"jpg": bytes, "cls": int}``:

- ``cls``, ``index``, ``id`` and the like: an ``int``;
- ``txt``, ``text`` and ``json``: a ``str``. JSON stays text, since its structure may differ from sample to sample,
  which that of a stored sample may not; the transform parses it;
- ``npy``: an array; ``npz``: a dict of arrays;
- everything else: the ``bytes`` as they are, pictures too.

Shards are read from front to back. A shard that is cut short is found before the first sample is packed.
"""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_speedkit.data.sources.columns import Columns
from lightning_speedkit.data.sources.image_check import check_image
from lightning_speedkit.data.sources.source import Item, Source, open_unzipped, unread_rest
from lightning_speedkit.errors import SourceError

__all__ = ["WebDatasetShards"]

_INTEGERS = ("cls", "cls2", "class", "count", "index", "inx", "id")
_TEXTS = ("txt", "text", "transcript")
_PICTURES = ("jpg", "jpeg", "png", "webp")
_KEY = "__key__"
_END_MARK = bytes(512)
_FAULTS = (tarfile.TarError, EOFError, OSError, zlib.error)


class WebDatasetShards(Source):
    """The samples of ``.tar`` or ``.tar.gz`` files, one file after the other.

    Args:
        paths: the shards in their order.
        columns: the extensions to read, in the order that the sample shall have. ``jpg;jpeg;png`` is the first of
            these that a sample has, under the first name. ``__key__`` is the name that the files of a sample share.
            By default every extension, without the key.
        check: how closely pictures are looked at: ``"quick"``, ``"full"`` or ``"none"``.

    Raises:
        SourceError: when it is counted or read: a shard that is not a tar file or was cut short.
    """

    format = "webdataset"

    def __init__(self, paths: Sequence[Path], *, columns: Columns | None = None, check: str = "quick") -> None:
        self._paths = tuple(paths)
        self._check = check
        self._wanted = None if columns is None else [_alternatives(name, kind) for name, kind in columns.items()]
        self._count: int | None = None
        self._left_out: Counter[str] = Counter()

    def __len__(self) -> int:
        if self._count is None:
            self._left_out.clear()
            self._count = sum(1 for path in self._paths for _ in self._samples(path, contents=False))
        return self._count

    def items(self) -> Iterator[Item]:
        """One item per sample, with the contents of its files. A shard that is cut short ends in one for its rest."""
        for path in self._paths:
            key = ""
            try:
                for key, files in self._samples(path, contents=True):
                    place = f"{path} key {key!r}"
                    yield Item(place, self._reader(place, key, files))
            except SourceError as error:
                after = f", after the key {key!r}" if key else ""
                yield unread_rest(f"{path}{after}", str(error).removeprefix(f"{path}: "), path)

    def notes(self) -> tuple[str, ...]:
        """Files of the shards that belong to no sample."""
        kinds = ", ".join(f"{count} {name}" for name, count in self._left_out.most_common(5))
        return (f"files of the shards that belong to no sample were left out: {kinds}",) if kinds else ()

    def _samples(self, path: Path, *, contents: bool) -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
        """Each key with its files. Without ``contents`` the files are empty, and only headers are read."""
        key, files = None, []
        for name, data in self._members(path, contents=contents):
            folder, _, file = name.rpartition("/")
            stem, dot, extension = file.partition(".")
            if not stem or not dot or not extension:
                if not contents:
                    self._left_out["hidden" if not stem else "without an extension"] += 1
                continue
            this = f"{folder}/{stem}" if folder else stem
            if key is not None and this != key:
                yield key, files
                files = []
            key = this
            files.append((extension.lower(), data))
        if key is not None:
            yield key, files

    def _members(self, path: Path, *, contents: bool) -> Iterator[tuple[str, bytes]]:
        try:
            with open_unzipped(path) as file, tarfile.open(fileobj=file, mode="r:") as archive:
                while (member := archive.next()) is not None:
                    archive.members = []  # type: ignore[attr-defined]  # it would keep all of them
                    if member.isfile():
                        yield member.name, _content(archive, member) if contents else b""
                file.seek(archive.offset)
                if file.read(512) != _END_MARK:
                    raise SourceError(f"{path}: the shard has no end mark: it was cut short, or is damaged.")
                while file.read(1 << 20):  # padding, and behind it the checksum of a gzip file
                    pass
        except _FAULTS as error:
            raise SourceError(f"{path}: cannot be read as a tar file: {error}.") from error

    def _reader(self, place: str, key: str, files: list[tuple[str, bytes]]) -> Callable[[], dict[str, Any]]:
        def read() -> dict[str, Any]:
            there = dict(files)
            if len(there) != len(files):
                raise SourceError(f"{place}: two of its files have one extension ({', '.join(e for e, _ in files)}).")
            named = list(there.items()) if self._wanted is None else self._chosen(place, key, there)
            return {name: self._decoded(place, name, data) for name, data in named}

        return read

    def _chosen(self, place: str, key: str, there: dict[str, bytes]) -> list[tuple[str, bytes]]:
        assert self._wanted is not None
        chosen = []
        for names in self._wanted:
            found = next((name for name in names if name in there or name == _KEY), None)
            if found is None:
                raise SourceError(f"{place}: it has no {' or '.join(names)}, but {', '.join(there)}.")
            chosen.append((names[0], key.encode("utf-8", "surrogateescape") if found == _KEY else there[found]))
        return chosen

    def _decoded(self, place: str, name: str, data: bytes) -> Any:
        kind = name.rpartition(".")[2]  # of "seg.png" or "left.npy"
        try:
            if kind in _INTEGERS:
                return int(data)
            if name == _KEY or kind in _TEXTS or kind == "json":
                text = data.decode()
                if kind == "json":
                    json.loads(text)
                return text
            if kind == "npy":
                return np.load(io.BytesIO(data), allow_pickle=False)
            if kind == "npz":
                with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                    return dict(arrays)
        except (ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error) as error:
            raise SourceError(f"{place}: its .{name} is not what the extension says ({error}).") from error
        if kind in _PICTURES:
            check_image(data, f"{place} .{name}", self._check)
        return data


def _alternatives(name: str, kind: str) -> list[str]:
    if kind:
        raise ValueError(f"columns has {name}:{kind}, but the extension decides the type in a WebDataset shard.")
    return [part.strip().lower() for part in name.split(";")]


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    assert file is not None
    data = file.read()
    if len(data) != member.size:
        raise EOFError(f"{member.name} ends after {len(data)} of {member.size} bytes")
    return data

"""What lies behind an address such as ``s3://bucket/train.lmdb``: opened by fsspec and the library that it names.

A server that sends parts of a file is read by several requests at once, any other from the beginning on. The names of
the classes of a store are read at once: they are small, and so their content is their version.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_speedkit.data.sources.class_names import classes_path, holds_class_names
from lightning_speedkit.data.staging.resumable_copy import attempts
from lightning_speedkit.data.staging.staging_source import Source, SourceFile, check_source, name_of, without_query
from lightning_speedkit.errors import MissingExtraError, StagingError

__all__ = ["find_remote"]

_STREAM_BYTES = 1 << 22
_NAMES_BYTES = 1 << 26  # more is no list of names, whatever a web server sends for their address
_TRY_AGAIN = (408, 425, 429)  # answers of a server that say nothing of what it has
_NOT_FOUND = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
_NOT_UNDERSTOOD = (ValueError, TypeError, LookupError, AttributeError, NotImplementedError)
_VERSION_KEYS = (  # as the file systems of fsspec name what changes with the content
    *("ETag", "etag", "e_tag", "Content-MD5", "content_md5", "Digest", "md5Hash", "md5", "crc32c", "CRC", "checksum"),
    *("generation", "VersionId", "version_id", "Last-Modified", "LastModified", "last_modified", "modified", "mtime"),
    *("updated", "created"),
)


class _AwayError(ConnectionError):
    """It could not be reached, which may pass."""


def find_remote(address: str, storage_options: Mapping[str, Any]) -> Source:
    """Look at what is there now: one byte of each file, to see whether the server sends parts, and the class names.

    Where nothing is known after a look (no connection, an answer such as 429 or 503), there are as many further ones,
    after the same pauses, as a copy makes.

    Raises:
        ConnectionError: it cannot be reached, not even in several attempts, so that nothing is known about it.
        StagingError: it is not there, may not be read, or is a folder without stores.
        MissingExtraError: fsspec, or aiohttp for an http address, is not installed.
        ValueError: fsspec knows no such protocol.
    """
    shown = _without_secrets(address)
    system, path = _open_system(address, shown, dict(storage_options))
    for _ in attempts():
        try:
            return _look(system, path, address, shown)
        except _AwayError as error:
            away = error
    raise away


def _look(system: Any, path: str, address: str, shown: str) -> Source:
    http, looked_at = _is_http(system), shown
    try:
        system.invalidate_cache()  # what it has listed before may be of an older version
        info = system.info(path)
        folder = info.get("type") == "directory"
        stores, listed = [(path, name_of(address), info)], None
        if folder:
            found = {str(one["name"]): one for one in system.ls(path, detail=True)}
            listed = {name_of(name) for name in found}
            stores = [(name, name_of(name), one) for name, one in sorted(found.items()) if name.endswith(".lmdb")]
        files = [_remote_file(system, where, one, name, http) for where, name, one in stores]
        looked_at = f"The file with the names of the classes of {shown}"
        names = [_class_names(system, where, name, http, listed) for where, name, _ in stores]
        files += [file for file in names if file is not None]
    except StagingError:
        raise
    except Exception as error:  # each library that fsspec uses has errors of its own
        raise _told(error, looked_at, http) from error
    return check_source(Source(address, shown, folder, tuple(files)))


def _open_system(address: str, shown: str, options: dict[str, Any]) -> tuple[Any, str]:
    protocol = re.split(r"::|://", address, maxsplit=1)[0]
    try:
        import fsspec
        from fsspec.core import url_to_fs
    except ImportError:
        raise MissingExtraError(f"staging from {protocol}://", extra="storage", library="fsspec") from None
    if protocol in ("http", "https"):
        options = _http_options(options)
    try:
        system, path = url_to_fs(address, **options)
    except ImportError as error:
        raise StagingError(f"{shown} cannot be opened: {error or protocol}. Install what it names.") from error
    except ValueError as error:
        if "rotocol" not in str(error):
            raise
        near = difflib.get_close_matches(protocol, fsspec.available_protocols(), n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "fsspec.available_protocols() lists what there is."
        raise ValueError(f"source={shown!r}: {error}; {hint}") from None
    return system, path


def _http_options(options: dict[str, Any]) -> dict[str, Any]:
    """The bytes as they are, never compressed, and no limit on the time of a whole file, only on standing still."""
    try:
        import aiohttp
    except ImportError:
        raise MissingExtraError("staging over http", extra="storage", library="aiohttp") from None
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)
    headers = {"Accept-Encoding": "identity", **options.get("headers", {})}
    return {**options, "headers": headers, "client_kwargs": {"timeout": timeout, **options.get("client_kwargs", {})}}


def _remote_file(system: Any, path: str, info: Mapping[str, Any], name: str, http: bool) -> SourceFile:
    size = info.get("size")
    version = {key: str(info[key]) for key in _VERSION_KEYS if info.get(key) is not None}
    whole = {"block_size": 0} if http else {}

    def read(start: int, length: int) -> bytes:
        return bytes(system.cat_file(path, start=start, end=start + length))

    def stream() -> Iterator[bytes]:
        with system.open(path, "rb", **whole) as opened:
            while data := opened.read(_STREAM_BYTES):
                yield data

    ranged = size is not None and _reads_parts(system, path, size)
    readers = 4 if getattr(system, "async_impl", False) else 1
    return SourceFile(name, size, version, read if ranged else None, stream, readers)


def _class_names(system: Any, store: str, name: str, http: bool, listed: set[str] | None) -> SourceFile | None:
    """The file with the names of the classes of a store, if it has one: in a folder the list of its files tells."""
    place, query = re.fullmatch(r"(?s)([^?#]*)(.*)", store).groups() if http else (store, "")  # type: ignore[union-attr]
    if not place.endswith(".lmdb"):
        return None
    name = classes_path(name).name
    if listed is not None and name not in listed:
        return None
    folder, slash, last = place.rpartition("/")
    path = f"{folder}{slash}{classes_path(last)}{query}"
    try:
        content = _names_from_web(system, path) if http else bytes(system.cat_file(path))
    except Exception as error:  # each library that fsspec uses has errors of its own
        if isinstance(error, FileNotFoundError) if listed is not None else _is_absent(error, http):
            return None
        raise
    if content is None:
        return None
    version = {"sha256": hashlib.sha256(content).hexdigest()}
    return SourceFile(name, len(content), version, lambda at, size: content[at : at + size], lambda: iter([content]), 1)


def _names_from_web(system: Any, path: str) -> bytes | None:
    """In one request; ``None`` for anything else than names: some servers send a page, or a file, for any address."""
    with system.open(path, "rb", block_size=0, size=1) as opened:  # with a size it does not ask for that first
        content = bytes(opened.read(_STREAM_BYTES))
        if not content.lstrip().startswith(b"{"):
            return None
        while len(content) <= _NAMES_BYTES and (data := opened.read(_STREAM_BYTES)):
            content += data
    return content if len(content) <= _NAMES_BYTES and holds_class_names(content) else None


def _is_absent(error: Exception, http: bool) -> bool:
    """Whether there are no names, or none for us, rather than no connection: the store itself was found just now."""
    status, _ = _status(error, http)
    if status is not None:
        return 400 <= status < 500 and status not in _TRY_AGAIN
    return isinstance(error, _NOT_FOUND + _NOT_UNDERSTOOD)


def _reads_parts(system: Any, path: str, size: int) -> bool:
    """Ask for the second byte alone: a web server without ranges would send the whole file for every part of it."""
    if size < 2:
        return False
    try:
        with system.open(path, "rb", cache_type="none") as file:
            file.seek(1)
            return len(file.read(1)) == 1
    except (ValueError, NotImplementedError):
        return False


def _told(error: Exception, shown: str, http: bool) -> OSError:
    """``StagingError`` for what is certainly not there or forbidden, ``ConnectionError`` if nothing is known."""
    status, last = _status(error, http)
    if status in (404, 410) or (last is error and isinstance(error, FileNotFoundError)):
        return StagingError(f"There is nothing at {shown} to be staged.")
    if status in (401, 403) or isinstance(error, PermissionError):
        return StagingError(f"{shown} may not be read ({status or error}); give credentials in storage_options.")
    why = f"the server answers {status}" if status else f"{type(last).__name__}: {last}".rstrip(": ")
    passes = status is None or status >= 500 or status in _TRY_AGAIN
    return (_AwayError if passes else ConnectionError)(f"{shown} cannot be reached: {why}")


def _status(error: Exception, http: bool) -> tuple[int | None, Exception]:
    """What a web server answered, and the error that tells it: fsspec says "not found" whatever it was."""
    last, cause = error, error.__cause__
    while http:
        status = getattr(last, "status", None)
        if status is not None:
            return int(status), last
        if not isinstance(cause, Exception):
            break
        last, cause = cause, cause.__cause__
    return None, last


def _is_http(system: Any) -> bool:
    protocol = system.protocol
    return "http" in ((protocol,) if isinstance(protocol, str) else protocol)


def _without_secrets(address: str) -> str:
    """Without a password in front of a host, and without the query of a web address."""
    return "::".join(re.sub(r"//[^/@]*@", "//", without_query(part)) for part in address.split("::"))

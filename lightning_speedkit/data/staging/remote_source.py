"""What lies behind an address such as ``s3://bucket/train.lmdb``: opened by fsspec and the library that it names.

A server that sends parts of a file is read by several requests at once, any other from the beginning on.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_speedkit.data.staging.staging_source import Source, SourceFile, check_source, name_of, without_query
from lightning_speedkit.errors import MissingExtraError, StagingError

__all__ = ["find_remote"]

_STREAM_BYTES = 1 << 22
_VERSION_KEYS = (  # as the file systems of fsspec name what changes with the content
    *("ETag", "etag", "e_tag", "Content-MD5", "content_md5", "Digest", "md5Hash", "md5", "crc32c", "CRC", "checksum"),
    *("generation", "VersionId", "version_id", "Last-Modified", "LastModified", "last_modified", "modified", "mtime"),
    *("updated", "created"),
)


def find_remote(address: str, storage_options: Mapping[str, Any]) -> Source:
    """Look at what is there now; nothing is read but one byte of each file, to see whether the server sends parts.

    Raises:
        ConnectionError: it cannot be reached, so that nothing is known about it.
        StagingError: it is not there, may not be read, or is a folder without stores.
        MissingExtraError: fsspec, or aiohttp for an http address, is not installed.
        ValueError: fsspec knows no such protocol.
    """
    shown = _without_secrets(address)
    system, path = _open_system(address, shown, dict(storage_options))
    http = _is_http(system)
    try:
        system.invalidate_cache()  # what it has listed before may be of an older version
        info = system.info(path)
        folder = info.get("type") == "directory"
        infos = [info]
        if folder:
            infos = [one for one in system.ls(path, detail=True) if str(one["name"]).endswith(".lmdb")]
            infos.sort(key=lambda one: str(one["name"]))
        names = [name_of(str(one["name"])) for one in infos] if folder else [name_of(address)]
        paths = [one["name"] for one in infos] if folder else [path]
        files = tuple(
            _remote_file(system, where, one, name, http) for where, one, name in zip(paths, infos, names, strict=True)
        )
    except StagingError:
        raise
    except Exception as error:  # each library that fsspec uses has errors of its own
        raise _told(error, shown, http) from error
    return check_source(Source(address, shown, folder, files))


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
    status, last, cause = None, error, error.__cause__
    while http and status is None:  # fsspec says "not found" whatever a web server answered, and why is below
        status = getattr(last, "status", None)
        if status is not None or not isinstance(cause, Exception):
            break
        last, cause = cause, cause.__cause__
    if status in (404, 410) or (last is error and isinstance(error, FileNotFoundError)):
        return StagingError(f"There is nothing at {shown} to be staged.")
    if status in (401, 403) or isinstance(error, PermissionError):
        return StagingError(f"{shown} may not be read ({status or error}); give credentials in storage_options.")
    why = f"the server answers {status}" if status else f"{type(last).__name__}: {last}".rstrip(": ")
    return ConnectionError(f"{shown} cannot be reached: {why}")


def _is_http(system: Any) -> bool:
    protocol = system.protocol
    return "http" in ((protocol,) if isinstance(protocol, str) else protocol)


def _without_secrets(address: str) -> str:
    """Without a password in front of a host, and without the query of a web address."""
    return "::".join(re.sub(r"//[^/@]*@", "//", without_query(part)) for part in address.split("::"))

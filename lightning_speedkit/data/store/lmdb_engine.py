"""Opens LMDB environments the way a store needs them, whatever version of the binding is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lmdb

__all__ = ["LmdbError", "MapFull", "open_engine"]

LmdbError: type[Exception] = lmdb.Error
MapFull: type[Exception] = lmdb.MapFullError


def open_engine(path: Path, *, readonly: bool, map_bytes: int) -> Any:
    """An LMDB 0.9 environment in one file, without LMDB's lock file.

    Readers need no lock because a published store never changes; the writer holds a lock of its own. From version 2 on
    the binding has two engines, of which engine 1 writes a file that older bindings cannot read: engine 0 is pinned.
    ``readahead`` stays on: blocks are read whole, and without it a cold disk delivers a page at a time.
    """
    arguments: dict[str, Any] = {
        "map_size": map_bytes,
        "subdir": False,
        "readonly": readonly,
        "create": not readonly,
        "lock": False,
        "readahead": True,
        "sync": False,
        "metasync": False,
        "mode": 0o666,
        "max_dbs": 0,
    }
    try:
        return lmdb.open(str(path), lib_version=0, **arguments)
    except TypeError:  # a binding of version 1, which has no other engine
        return lmdb.open(str(path), **arguments)

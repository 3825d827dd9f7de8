"""Finds which fields of a store hold encoded pictures, by a look at its first sample."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from lightning_speedkit.data.images.image_header import read_image_header
from lightning_speedkit.data.store.lmdb_store import OpenStore, open_store
from lightning_speedkit.errors import ImageError

__all__ = ["encoded_bytes", "encoded_pictures"]


def encoded_bytes(path: Path) -> dict[str, str]:
    """The places of bytes in a sample, such as ``['image']``, and the key or position alone where there is only one."""
    store = open_store(path.expanduser().absolute())
    try:
        return _places_of_bytes(store)
    finally:
        store.close()


def encoded_pictures(path: Path) -> dict[str, str]:
    """Those of :func:`encoded_bytes` that are a JPEG, PNG or WebP in the first sample.

    >>> import tempfile
    >>> from lightning_speedkit.data import write_lmdb
    >>> folder = tempfile.TemporaryDirectory()
    >>> encoded_pictures(write_lmdb([(b"no picture", 1)], f"{folder.name}/a.lmdb"))
    {}
    """
    store = open_store(path.expanduser().absolute())
    try:
        places = _places_of_bytes(store)
        sample: Any = store.read(0) if places else None
    finally:
        store.close()
    found = {}
    for place, typed in places.items():
        try:
            keys = [ast.literal_eval(key) for key in place[1:-1].split("][")] if place else []
            value = sample
            for key in keys:
                value = value[key]
            read_image_header(memoryview(value))
        except (ImageError, SyntaxError, ValueError, LookupError, TypeError):  # no picture, or a key with brackets
            continue
        found[place] = typed
    return found


def _places_of_bytes(store: OpenStore) -> dict[str, str]:
    return {place: _typed(place) for place, leaf in store.index.schema.leaves() if leaf.kind == "bytes"}


def _typed(place: str) -> str:
    """The key or position alone where a place has only one, else the place as it is."""
    try:
        (key,) = ast.literal_eval(place)
    except (SyntaxError, ValueError):  # nothing, or one behind the other
        return place
    return str(key)

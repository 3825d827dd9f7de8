"""The names of the classes of a store, in a small file beside it.

``train.lmdb`` has them in ``train.classes.json``, with the fingerprint of the store that they belong to, so that the
names of a store that has been replaced meanwhile are not taken for those of the new one. The class with the number
``i`` of a sample is the name at ``i``. Where a store is copied by other means than staging, the file has to go along.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from lightning_speedkit.data.store.lmdb_format import open_for_reading, read_seal
from lightning_speedkit.errors import SourceError
from lightning_speedkit.facts.codec import write_json

__all__ = ["classes_path", "holds_class_names", "read_classes", "write_classes"]


def classes_path(store: str | os.PathLike[str]) -> Path:
    """Where the names of the classes of a store lie.

    >>> str(classes_path("data/train.lmdb"))
    'data/train.classes.json'
    """
    path = Path(store).expanduser()
    return path.with_name(path.name.removesuffix(".lmdb") + ".classes.json")


def read_classes(store: str | os.PathLike[str]) -> tuple[str, ...] | None:
    """The names of the classes by their number, or ``None`` if the store has none.

    Raises:
        SourceError: the file with the names is damaged, or belongs to another store than the one that is there.
        StoreNotFoundError: there is no store.
    """
    path = classes_path(store)
    fingerprint = _fingerprint(store)
    try:
        classes, written_for = _parsed(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{path} does not hold the names of classes: {error!r}. Pack the store again.") from error
    if written_for != fingerprint:
        raise SourceError(
            f"{path} belongs to another store than {store}, which was replaced since. Remove it, or pack the store "
            f"again."
        )
    return classes


def holds_class_names(content: bytes) -> bool:
    """Whether these are the bytes of such a file, of whatever store.

    >>> holds_class_names(b'{"fingerprint": "00", "classes": ["cat"]}'), holds_class_names(b"<html>No such page</html>")
    (True, False)
    """
    try:
        _parsed(content)
    except (ValueError, KeyError, TypeError):
        return False
    return True


def write_classes(store: str | os.PathLike[str], classes: Sequence[str]) -> None:
    """Put the names beside a finished store, at once; without any names, remove those of an older store."""
    path = classes_path(store)
    if not classes:
        path.unlink(missing_ok=True)
        return
    write_json(json.dumps({"fingerprint": _fingerprint(store), "classes": list(classes)}, indent=1), path)


def _parsed(content: bytes) -> tuple[tuple[str, ...], object]:
    """The names, and the fingerprint of the store that they were written for."""
    told = json.loads(content)
    return tuple(map(str, told["classes"])), told["fingerprint"]


def _fingerprint(store: str | os.PathLike[str]) -> str:
    path = Path(store).expanduser()
    file = open_for_reading(path)
    try:
        return read_seal(file, path).fingerprint.hex()
    finally:
        os.close(file)

"""Bindings with and without a choice of engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lmdb
import pytest

from lightning_speedkit.data import LMDBDataset, write_lmdb
from lightning_speedkit.data.store import lmdb_engine as engine_module


def test_a_binding_without_engines_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = lmdb.open

    def old_open(path: str, **arguments: Any) -> Any:
        calls.append(sorted(arguments))
        if "lib_version" in arguments:
            raise TypeError("'lib_version' is an invalid keyword argument for this function")
        return real(path, **arguments)

    monkeypatch.setattr(engine_module.lmdb, "open", old_open)
    assert LMDBDataset(write_lmdb([1, 2], tmp_path / "a.lmdb"))[1] == 2
    assert len(calls) == 4

"""Presets that a test registers are gone after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lightning_speedkit.presets.catalogue import REGISTRY


@pytest.fixture(autouse=True)
def _registry_as_found() -> Iterator[None]:
    found = dict(REGISTRY._presets)
    yield
    REGISTRY._presets.clear()
    REGISTRY._presets.update(found)

"""The benchmark's own numbers: the kit finds each known limit, within its number of trials."""

from __future__ import annotations

import logging

import pytest

from benchmarks.batch_size_search import measure
from tests.memory.scarce import quick_collections


@pytest.mark.filterwarnings("ignore")
def test_the_kit_is_exact_under_ten_limits() -> None:
    level = logging.getLogger("lightning.pytorch").level
    try:
        with quick_collections():
            told = measure("kit", limits=10, most=40)
    finally:
        logging.getLogger("lightning.pytorch").setLevel(level)
    assert {name: told[name] for name in ("wrong", "over budget", "raised")} == {
        "wrong": 0,
        "over budget": 0,
        "raised": 0,
    }

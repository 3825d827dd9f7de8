"""The benchmark's networks have the zeros that they were asked for; its seconds are not looked at here."""

from __future__ import annotations

import pytest

from benchmarks.prune import measure, variants

SIZE = {"epochs": 3, "width": 16, "calls": 1}
WEIGHTS = 64 * 16 + 16 * 16 + 16 * 10


@pytest.mark.parametrize("way", ["dense", "one-shot", "magnitude", "movement"])
def test_zeros_are_those_that_were_asked_for(way: str) -> None:
    told = measure(way, 0.0 if way == "dense" else 0.8, **SIZE)
    assert told["zero_share"] == (0.0 if way == "dense" else round(0.8 * WEIGHTS) / WEIGHTS)
    assert told["seconds_per_step"] > 0
    assert told["test_accuracy"] > 0.1


@pytest.mark.filterwarnings("ignore")
def test_lightnings_callback_misses_the_number() -> None:
    assert measure("lightning", 0.8, **SIZE)["zero_share"] > 0.85  # 0.8 of what is left, again and again


def test_each_way_of_pruning_is_there_at_each_sparsity() -> None:
    told = {variant.name: variant.arguments for variant in variants()}
    assert told["dense"]["sparsity"] == 0.0
    assert {"one-shot 0.95", "gradual 0.95", "gradual, movement 0.95"} <= told.keys()
    assert len({arguments["epochs"] for arguments in told.values()}) == 1

"""The function of the benchmark, on few epochs."""

from __future__ import annotations

import math

from benchmarks.lighten import measure, variants


def test_a_variant_tells_costs_and_accuracies() -> None:
    light = measure("MLP", {"kinds": ["low-rank"], "ratio": 0.1}, "distilled", seed=0, epochs=1, further=1)
    full = measure("MLP", None, seed=0, epochs=1, further=1)
    assert light.keys() == full.keys()
    assert light["weights"] < 0.15 * full["weights"]
    assert light["flops_per_sample"] < 0.15 * full["flops_per_sample"]
    assert all(math.isfinite(value) for value in light.values())
    assert light["accuracy_trained_on"] > 0.5


def test_the_variants_are_held_against_the_full_network_trained_on() -> None:
    told = variants()
    assert len({variant.name for variant in told}) == len(told) == 14
    assert {variant.baseline for variant in told} == {None, "CNN trained on", "MLP trained on"}

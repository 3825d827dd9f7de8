"""The script trains, and rounds what it has trained; its numbers mean nothing after one epoch."""

from __future__ import annotations

import pytest

from benchmarks.quantize_aware import measure, variants


@pytest.mark.parametrize("network", ["CNN", "MLP"])
def test_each_way_answers_with_accuracies(network: str) -> None:
    told = [measure(network, 3, aware, epochs=1, limit=160) for aware in (False, True)]
    for one in told:
        assert 0 <= one["integer_accuracy"] <= 1
        assert one["seconds_per_step"] > 0
    # one seed: the two differ by the rounding in the last fifth alone
    assert abs(told[0]["float_accuracy"] - told[1]["float_accuracy"]) < 0.2


def test_each_aware_variant_is_held_against_the_same_network_and_bits() -> None:
    told = {variant.name: variant for variant in variants()}
    for variant in told.values():
        other = told[variant.baseline or ""].arguments
        assert not other["aware"]
        assert (other["network"], other["bits"]) == (variant.arguments["network"], variant.arguments["bits"])

"""The script shrinks each network as it says; its seconds are not looked at here."""

from __future__ import annotations

import pytest

from benchmarks.shrink import EPOCHS, measure, variants

PARAMETERS = {
    # convolutions without bias, two numbers per BatchNorm channel, the head
    "CNN": (
        9 * 32 + 9 * 32 * 64 + 9 * 64 * 64 + 2 * (32 + 64 + 64) + 257 * 10,
        9 * 16 + 9 * 16 * 32 + 9 * 32 * 32 + 2 * (16 + 32 + 32) + 129 * 10,
    ),
    "MLP": (65 * 1024 + 2 * 1025 * 1024 + 10250, 65 * 512 + 2 * 513 * 512 + 5130),
    "transformer": (0, 2 * (512 * 256 * 2 + 512)),  # what two layers lose
}


@pytest.mark.parametrize("network", EPOCHS)
def test_half_of_the_channels_are_gone_from_what_is_timed(network: str) -> None:
    told = {way: measure(network, way, epochs=0, calls=1, limit=32) for way in ("whole", "shrunk")}
    whole, shrunk = PARAMETERS[network]
    if network == "transformer":
        assert told["whole"]["parameters"] - told["shrunk"]["parameters"] == shrunk
    else:
        assert (told["whole"]["parameters"], told["shrunk"]["parameters"]) == (whole, shrunk)
    assert all(value > 0 for way in told.values() for name, value in way.items() if name != "test_accuracy")


def test_each_network_is_held_against_itself_whole() -> None:
    for variant in variants():
        assert variant.baseline == f"{variant.arguments['network']}, whole"
        assert variant.requires == "torch_pruning"

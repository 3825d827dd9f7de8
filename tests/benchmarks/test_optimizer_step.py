"""The script steps with each optimizer; its seconds are not looked at here, its bytes are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.optimizer_step import measure, state_bytes, variants


@pytest.mark.parametrize(
    ("name", "states"),
    [(None, 2.0), ("adamw", 2.0), ("adam", 2.0), ("sgd-momentum", 1.0), ("schedule-free", 2.0), ("adafactor", None)],
)
def test_every_optimizer_steps_and_has_the_state_that_it_is_known_for(name: str | None, states: float | None) -> None:
    metrics = measure(steps=1, layers=2, width=8, name=name)
    assert metrics["seconds_per_step"] > 0
    told = metrics["state_bytes_per_weight_byte"]
    if states is None:  # a row and a column per matrix
        assert 0 < told < 1
    else:
        assert told == pytest.approx(states, abs=0.01)  # and a count of steps per weight


def test_each_variant_is_held_against_torchs_default_on_the_same_model() -> None:
    told = {variant.name: variant for variant in variants()}
    for variant in told.values():
        default = told[variant.baseline or ""].arguments
        assert default["name"] is None
        assert (default["layers"], default["width"]) == (variant.arguments["layers"], variant.arguments["width"])
    assert sum(variant.arguments["name"] == "adamw" for variant in told.values()) == 3


def test_a_tensor_made_of_others_has_their_bytes() -> None:
    class Quantized(Tensor):
        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return ["codes", "scale"], None

    made = torch.zeros(100).as_subclass(Quantized)
    made.codes, made.scale = torch.zeros(100, dtype=torch.uint8), torch.zeros(2)  # type: ignore[attr-defined]
    assert state_bytes([made, torch.zeros(3)]) == 100 + 8 + 12

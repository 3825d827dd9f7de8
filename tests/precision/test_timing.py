"""The short measurement: what it times, how it judges, and that it leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_speedkit.facts import Hardware
from lightning_speedkit.precision import fastest_precision, measure_precision, timing
from tests.precision.test_numeric_switches import everything


def _with_times(monkeypatch: pytest.MonkeyPatch, times: dict[str, list[float]]) -> list[str]:
    """From here on the load takes these times in turn, the first one in the warm-up; returns the order of the calls."""
    order: list[str] = []

    def seconds_under(self: Any, name: str) -> float:
        order.append(name)
        return times[name][(order.count(name) - 1) % len(times[name])]

    monkeypatch.setattr(timing._Load, "seconds_under", seconds_under)
    return order


def test_the_median_without_the_warm_up_in_alternating_order(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"32-true": [100.0, 4.0, 5.0, 60.0], "bf16-mixed": [100.0, 2.0, 1.0, 3.0]}
    order = _with_times(monkeypatch, times)
    found = measure_precision("cpu", list(times), seconds=1e-9)
    assert found.seconds == {"32-true": 5.0, "bf16-mixed": 2.0}
    assert (found.device, found.rounds, found.fastest) == ("cpu", 3, "bf16-mixed")
    one, other = times
    assert order == [one, other, one, other, other, one, one, other]


@pytest.mark.parametrize(
    ("seconds", "fastest"),
    [
        ({"32-true": 1.0, "bf16-mixed": 0.96}, "32-true"),
        ({"32-true": 1.0, "bf16-mixed": 0.94}, "bf16-mixed"),
        ({"32-true": 1.0, "bf16-mixed": 0.5, "16-mixed": 0.4}, "16-mixed"),
        ({"32-true": 1.0, "bf16-mixed": 3.0, "16-mixed": 2.0}, "32-true"),
        ({"bf16-mixed": 0.5, "16-mixed": 0.49}, "16-mixed"),
    ],
)
def test_float32_wins_unless_another_is_clearly_faster(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float], fastest: str
) -> None:
    _with_times(monkeypatch, {name: [value] for name, value in seconds.items()})
    assert measure_precision("cpu", list(seconds), seconds=1e-9).fastest == fastest
    if list(seconds) == ["32-true", "bf16-mixed"]:  # those of a CPU by default
        assert fastest_precision("cpu", measure=True) == fastest


def test_a_real_measurement_leaves_no_trace() -> None:
    torch.manual_seed(3)
    random, settings = torch.get_rng_state(), everything()
    with torch.no_grad():
        found = measure_precision("cpu", seconds=0.01)
        assert not torch.is_grad_enabled()
    assert list(found.seconds) == ["32-true", "bf16-mixed"]
    assert all(value > 0 for value in found.seconds.values())
    assert found.fastest in found.seconds
    assert torch.equal(torch.get_rng_state(), random)
    assert everything() == settings


def test_products_and_convolutions_run_in_the_type_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype] = []
    linear, convolution = torch.nn.functional.linear, torch.nn.functional.conv2d

    def noting(function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            output = function(*arguments, **named)
            seen.append(output.dtype)
            return output

        return call

    monkeypatch.setattr(torch.nn.functional, "linear", noting(linear))
    monkeypatch.setattr(torch.nn.functional, "conv2d", noting(convolution))
    load = timing._Load(torch.device("cpu"))
    for name, dtype in (("32-true", torch.float32), ("bf16-mixed", torch.bfloat16)):
        seen.clear()
        assert load.seconds_under(name) > 0
        assert seen == [dtype] * 6


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"accelerator": "quantum"}, ValueError, "accelerator='quantum' is unknown"),
        ({"candidates": ["fp8"]}, ValueError, "'fp8' cannot be measured; use some of '32-true', 'bf16-mixed'"),
        ({"candidates": []}, ValueError, "must name one or more"),
        ({"candidates": ["32-true", "32-true"]}, ValueError, "each once"),
        ({"candidates": "32-true"}, TypeError, "must be a list"),
        ({"seconds": 0}, ValueError, "seconds=0 must be a number above 0"),
        ({"seconds": float("nan")}, ValueError, "must be a number above 0"),
        ({"seconds": float("inf")}, ValueError, "must be a number above 0"),
        ({"seconds": "2"}, TypeError, "got str"),
        ({"seconds": True}, TypeError, "got bool"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        measure_precision(**{"accelerator": "cpu", **arguments})


def test_another_machine_cannot_be_measured() -> None:
    with pytest.raises(ValueError, match="measure=True measures this machine"):
        fastest_precision(Hardware(accelerator="cpu", device_name="another"), measure=True)
    with pytest.raises(TypeError, match="hardware is a Hardware"):
        fastest_precision(3, measure=True)  # type: ignore[arg-type]

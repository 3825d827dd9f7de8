"""A word that is not allowed is answered with the one that was meant, or with none."""

from __future__ import annotations

import pytest

from lightning_speedkit.compress.choice import check_choice
from lightning_speedkit.compress.engine import FORMATS, SCHEMES
from lightning_speedkit.compress.shrink_choice import CRITERIA

_ARGUMENTS = {
    "objective": ("latency", "size"),
    "device": ("cpu", "cuda", "auto"),
    "mode": ("auto", "min", "max"),
    "calibration": ("train", "val"),
    "weights": ("last", "best"),
    "scope": ("global", "layer"),
    "scheme": SCHEMES,
    "artefacts": FORMATS,
    "criterion": tuple(CRITERIA),
}


@pytest.mark.parametrize(
    ("argument", "given", "meant"),
    [
        ("objective", "speed", "latency"),
        ("objective", "Throughput", "latency"),
        ("objective", "memory", "size"),
        ("objective", "latenzy", "latency"),
        ("objective", "energy", None),
        ("device", "gpu", "cuda"),
        ("device", "tpu", "cpu"),
        ("mode", "maximum", "max"),
        ("mode", "higher", "max"),
        ("calibration", "validation", "val"),
        ("calibration", "test", None),
        ("weights", "bets", "best"),
        ("weights", "final", "last"),
        ("scope", "local", "layer"),
        ("scheme", "int8-static", "static-int8"),
        ("scheme", "WEIGHT_ONLY_INT8", "weight-only-int8"),
        ("artefacts", "onx", "onnx"),
        ("criterion", "l1", "magnitude"),
        ("criterion", "gradient", "taylor"),
        ("criterion", 3, None),
    ],
)
def test_what_was_meant_is_suggested_and_nothing_else(argument: str, given: object, meant: str | None) -> None:
    allowed = _ARGUMENTS[argument]
    with pytest.raises(ValueError, match=f"{argument} must be one of {allowed[0]!r}, ") as refusal:
        check_choice(argument, given, allowed)
    told = str(refusal.value)
    assert f"got {given!r}." in told
    assert told.endswith(f" Did you mean {meant!r}?" if meant else f"got {given!r}.")


@pytest.mark.parametrize(("argument", "allowed"), _ARGUMENTS.items())
def test_every_allowed_word_is_taken(argument: str, allowed: tuple[str, ...]) -> None:
    for word in allowed:
        check_choice(argument, word, allowed)

"""Which metric decides, and what a copy of the module logs."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lightning_speedkit.compress.judge import Judge, ValidationData, measured_metrics
from lightning_speedkit.errors import QuantizationError
from tests.compress.models import Digits, digit_loader, mlp


class TestJudge:
    @pytest.mark.parametrize(
        ("logged", "monitored", "expected"),
        [
            (["val_loss", "val_acc"], [], ("val_acc", "max")),
            (["val_loss", "val_acc"], [("val_loss", "min")], ("val_acc", "max")),
            (["val_loss", "val_acc", "val_f1"], [("val_f1", "max")], ("val_f1", "max")),
            (["val_loss", "train_loss"], [], ("val_loss", "min")),
            (["a_loss", "mse"], [("mse", "min")], ("mse", "min")),
            (["speed", "a_loss"], [], ("a_loss", "min")),
            (["speed"], [], ("speed", "max")),
            ([], [("val_loss", "min")], None),
        ],
    )
    def test_choice(self, logged: list[str], monitored: list[tuple[str, str]], expected: Any) -> None:
        assert Judge(monitored=monitored).choose(dict.fromkeys(logged, 0.5)) == expected

    def test_values_that_are_not_finite_are_no_metric(self) -> None:
        assert Judge().choose({"val_acc": math.nan, "val_loss": 1.0}) == ("val_loss", "min")


@pytest.mark.parametrize(
    ("logged", "expected"),
    [
        (["val_loss", "val_MulticlassAccuracy"], ("val_MulticlassAccuracy", "max")),
        (["val_loss", "val_acc1"], ("val_acc1", "max")),
        (["val_dice_loss", "val_f1"], ("val_f1", "max")),
        (["val_dice_loss", "speed"], ("val_dice_loss", "min")),
        (["val_BinaryF1Score", "val_loss"], ("val_BinaryF1Score", "max")),
    ],
)
def test_an_accuracy_is_known_under_the_names_it_has(logged: list[str], expected: tuple[str, str]) -> None:
    assert Judge().choose(dict.fromkeys(logged, 0.5)) == expected


def test_the_metric_that_is_asked_for_decides_with_the_mode_of_who_watches_it() -> None:
    logged = {"val_acc": 0.5, "quality": 0.5}
    assert Judge(monitor="quality").choose(logged) == ("quality", "max")
    assert Judge(monitor="quality", monitored=[("quality", "min")]).choose(logged) == ("quality", "min")
    assert Judge(monitor="quality", mode="max", monitored=[("quality", "min")]).choose(logged) == ("quality", "max")
    with pytest.raises(QuantizationError, match=r"monitor='loss' was not logged .*logged: \['val_acc', 'quality'\]"):
        Judge(monitor="loss").choose(logged)


def test_metrics_of_a_copy_leave_the_module_alone_and_a_failure_is_told() -> None:
    module = Digits(mlp()).eval()
    data = ValidationData(loaders=digit_loader(0, 96, 32), limit_batches=2)
    metrics, count = measured_metrics(module, data)
    assert set(metrics) == {"val_loss", "val_acc"}
    assert count == 2
    assert module._trainer is None
    assert measured_metrics(module, None) == ({}, 0)
    module.validation_step = lambda *_: 1 / 0  # type: ignore[method-assign, assignment]
    with pytest.raises(QuantizationError, match=r"Validation failed \(ZeroDivisionError: division by zero\)"):
        measured_metrics(module, data)

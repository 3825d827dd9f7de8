"""An int8 copy is tried, measured against the float module, and judged by a metric."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor

import lightning_speedkit.compress.trial as trial_module
from lightning_speedkit.compress.float_copy import fingerprint
from lightning_speedkit.compress.torch_ao import (
    is_quantized,
)
from lightning_speedkit.compress.trial import Judge, ValidationData, try_int8
from lightning_speedkit.errors import QuantizationError
from tests.compress.models import (
    ConvNet,
    Digits,
    digit_loader,
    mlp,
)


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


def _batches(count: int = 2) -> list[Any]:
    return [[x, y] for x, y in digit_loader(0, 32 * count, 32)]


def _data(start: int = 1024, stop: int = 1152) -> ValidationData:
    return ValidationData(loaders=digit_loader(start, stop, 32))


def _try(module: LightningModule, data: ValidationData | None = None, **judge: Any) -> Any:
    return try_int8(module, _batches(), data, Judge(**judge), backend="auto", skip=())


def test_the_report_tells_what_the_metric_was_for_both() -> None:
    module = Digits(ConvNet())
    before = fingerprint(module)
    made, report = _try(module, _data(), max_metric_drop=1.0)
    assert made is not None
    x, y = (torch.cat(parts) for parts in zip(*_data().loaders, strict=True))

    def accuracy(model: Any) -> float:
        with torch.no_grad():
            return float((model(x).argmax(1) == y).float().mean())

    module.eval()
    assert (report.metric, report.metric_mode, report.validation_batches) == ("val_acc", "max", 4)
    assert report.metric_before == pytest.approx(accuracy(module))
    assert report.metric_after == pytest.approx(accuracy(made.module))
    assert report.bytes_before == pytest.approx(sum(v.nbytes for v in module.state_dict().values()), rel=0.3)
    assert (report.calibration_batches, report.layers_total, report.batch_size) == (2, 3, 32)
    assert report.attempts == (f"fx_static: {report.reason}",)
    assert fingerprint(module) == before


def test_limit_and_monitor_reach_the_validation() -> None:
    data = ValidationData(loaders=digit_loader(1024, 1152, 32), limit_batches=2)
    _, report = _try(Digits(mlp()), data, monitor="val_loss", max_metric_drop=10.0)
    assert (report.metric, report.validation_batches) == ("val_loss", 2)


def test_a_monitor_without_validation_keeps_nothing() -> None:
    made, report = _try(Digits(mlp()), None, monitor="val_acc")
    assert made is None
    assert report.reason.startswith("monitor='val_acc' was not logged")
    assert report.bytes_before is None


class _FailsInInt8(Digits):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if any(map(is_quantized, self.modules())):
            raise KeyError("no int8 here")
        super().validation_step(batch, batch_idx)


def test_validation_that_fails_in_int8_keeps_nothing_and_says_so() -> None:
    made, report = _try(_FailsInInt8(mlp()), _data())
    assert made is None
    assert report.reason == "In int8: Validation failed (KeyError: 'no int8 here')."
    assert (report.metric_after, report.metric_drop) == (None, None)
    assert report.metric_before is not None


def test_validation_that_always_fails_is_an_error_only_if_a_metric_was_asked_for() -> None:
    class Fails(Digits):
        def on_validation_epoch_end(self) -> None:
            raise LookupError("not here")

    made, report = _try(Fails(mlp()), _data())
    assert made is not None
    assert report.reason.startswith("Validation failed (LookupError: not here). The outputs differ by 0.0")
    made, report = _try(Fails(mlp()), _data(), monitor="val_acc")
    assert made is None
    assert report.reason == "Validation failed (LookupError: not here)."


def test_a_metric_that_is_nan_in_int8_is_an_infinite_drop() -> None:
    class Nan(Digits):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self(batch[0])
            self.log("val_acc", math.nan if any(map(is_quantized, self.modules())) else 0.5)

    made, report = _try(Nan(mlp()), _data(), max_metric_drop=100.0)
    assert made is None
    assert report.metric_drop == math.inf


def test_a_network_that_needs_a_full_batch_has_no_time_for_one_sample() -> None:
    class Full(Digits):
        def forward(self, x: Tensor) -> Tensor:
            assert len(x) > 1, "a full batch"
            return self.net(x)

    made, report = _try(Full(mlp()))
    assert made is not None
    assert report.seconds_before_one is None
    assert report.seconds_after_one is None
    assert report.seconds_before_batch > 0


def test_a_float_module_that_changed_is_an_error() -> None:
    class Shared:
        def __init__(self, weight: Tensor) -> None:
            self.weight = weight

        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("one of a kind")

    class Changes(Digits):
        def forward(self, x: Tensor) -> Tensor:
            self.shared.weight.add_(1)
            return self.net(x)

    module = Changes(mlp())
    module.shared = Shared(module.net[1].weight.data)
    with pytest.raises(QuantizationError, match="The float model changed while it was quantized"):
        _try(module)


def test_every_attempt_is_told_and_the_last_one_made_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    original = trial_module.checked_int8

    def first_fails(floating: Any, calls: Any, method: str, skip: Any) -> Any:
        if "fx_static" in method:
            raise QuantizationError("not today")
        return original(floating, calls, method, skip)

    monkeypatch.setattr(trial_module, "checked_int8", first_fails)
    made, report = _try(Digits(ConvNet()))
    assert made is not None
    assert report.backend == "dynamic"
    assert report.attempts == ("fx_static+dynamic: not today", f"dynamic: {report.reason}")
    assert "not today" not in report.reason

"""What a report says to a person and to a program."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from lightning_speedkit.compress import QuantizationReport


def test_report_is_valid_json_whatever_it_holds() -> None:
    report = QuantizationReport(kept=False, reason="x", metric_after=math.nan, metric_drop=math.inf, skipped={"a": "b"})
    values = json.loads(report.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (values["metric_after"], values["metric_drop"], values["skipped"]) == ("nan", "inf", {"a": "b"})


def _report(**changes: Any) -> QuantizationReport:
    values: dict[str, Any] = {
        "kept": True,
        "reason": "It holds.",
        "backend": "fx_static",
        "layers_quantized": ("a", "b"),
        "layers_total": 3,
        "bytes_before": 4_000_000,
        "bytes_after": 1_010_000,
        "batch_size": 64,
        "seconds_before_batch": 0.002,
        "seconds_after_batch": 0.001,
        "metric": "val_acc",
        "metric_before": 0.97,
        "metric_after": 0.96875,
    }
    return QuantizationReport(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {},
            "Quantized (fx_static): 2 of 3 layers in int8, 4 -> 1.01 MB, 2 -> 1 ms for a batch of 64, "
            "val_acc 0.97 -> 0.9688. It holds.",
        ),
        (
            {"kept": False, "reason": "It does not.", "seconds_after_batch": None},
            "Quantization not kept (fx_static): 2 of 3 layers in int8, 4 -> 1.01 MB, val_acc 0.97 -> 0.9688. "
            "It does not.",
        ),
        (
            {"metric": None},
            "Quantized (fx_static): 2 of 3 layers in int8, 4 -> 1.01 MB, 2 -> 1 ms for a batch of 64. It holds.",
        ),
        (
            {"metric_after": None},
            "Quantized (fx_static): 2 of 3 layers in int8, 4 -> 1.01 MB, 2 -> 1 ms for a batch of 64. It holds.",
        ),
        ({"kept": False, "bytes_after": None}, "Not quantized: It holds."),
    ],
    ids=["kept", "not kept", "no metric", "no metric in int8", "nothing made"],
)
def test_describe(changes: dict[str, Any], text: str) -> None:
    assert _report(**changes).describe() == text


def test_json_holds_every_field_and_a_schema() -> None:
    report = _report()
    values = json.loads(report.to_json())
    assert values.pop("schema") == 1
    assert set(values) == {field.name for field in dataclasses.fields(QuantizationReport)}
    assert values["layers_quantized"] == ["a", "b"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.kept = False  # type: ignore[misc]

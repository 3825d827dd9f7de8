"""What a report says to a person and to a program."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from lightning_speedkit.compress import QuantizationReport
from lightning_speedkit.compress.report import CandidateReport


def test_report_is_valid_json_whatever_it_holds() -> None:
    report = QuantizationReport(kept=False, reason="x", metric_after=math.nan, metric_drop=math.inf, skipped={"a": "b"})
    values = json.loads(report.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (values["metric_after"], values["metric_drop"], values["skipped"]) == ("nan", "inf", {"a": "b"})


def _report(**changes: Any) -> QuantizationReport:
    values: dict[str, Any] = {
        "kept": True,
        "reason": "It holds.",
        "backend": "torch-ao-static",
        "scheme": "static-int8",
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
            "Quantized to static-int8 (torch-ao-static): 2 of 3 layers, 4 -> 1.01 MB, 2 -> 1 ms for a batch of 64, "
            "val_acc 0.97 -> 0.9688. It holds.",
        ),
        (
            {"kept": False, "reason": "It does not.", "seconds_after_batch": None},
            "Quantization not kept (torch-ao-static): 2 of 3 layers, 4 -> 1.01 MB, val_acc 0.97 -> 0.9688. "
            "It does not.",
        ),
        (
            {"metric": None},
            "Quantized to static-int8 (torch-ao-static): 2 of 3 layers, 4 -> 1.01 MB, 2 -> 1 ms for a batch of 64. "
            "It holds.",
        ),
        (
            {"metric_after": None},
            "Quantized to static-int8 (torch-ao-static): 2 of 3 layers, 4 -> 1.01 MB, 2 -> 1 ms for a batch of 64. "
            "It holds.",
        ),
        ({"kept": False, "bytes_after": None}, "Not quantized: It holds."),
        (
            {"metric": None, "seconds_after_batch": None, "folder": "q", "files": ("manifest.json", "model.pt")},
            "Quantized to static-int8 (torch-ao-static): 2 of 3 layers, 4 -> 1.01 MB. It holds. "
            "Saved in q: manifest.json, model.pt.",
        ),
    ],
    ids=["kept", "not kept", "no metric", "no metric in int8", "nothing made", "where it is"],
)
def test_describe(changes: dict[str, Any], text: str) -> None:
    assert _report(**changes).describe() == text


def test_json_holds_every_field_and_a_schema() -> None:
    report = _report()
    values = json.loads(report.to_json())
    assert values.pop("schema") == 2
    assert set(values) == {field.name for field in dataclasses.fields(QuantizationReport)}
    assert values["layers_quantized"] == ["a", "b"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.kept = False  # type: ignore[misc]


def test_numbers_for_a_logger_are_finite_and_named() -> None:
    numbers = _report(metric_drop=math.inf, seconds_before_one=0.5).metrics()
    assert numbers == {
        "quantize/kept": 1.0,
        "quantize/layers": 2.0,
        "quantize/bytes_before": 4e6,
        "quantize/bytes_after": 1.01e6,
        "quantize/seconds_one_before": 0.5,
        "quantize/seconds_batch_before": 0.002,
        "quantize/seconds_batch_after": 0.001,
        "quantize/val_acc_before": 0.97,
        "quantize/val_acc_after": 0.96875,
    }


def test_json_has_a_line_for_each_candidate() -> None:
    candidate = CandidateReport(backend="b", scheme="fp8", outcome="metric", metric=math.nan, float_layers=("a",))
    (line,) = json.loads(_report(candidates=(candidate,)).to_json())["candidates"]
    assert (line["backend"], line["outcome"], line["metric"], line["float_layers"]) == ("b", "metric", "nan", ["a"])

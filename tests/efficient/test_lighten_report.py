"""The report as text and as data, and plans that do not fit."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from lightning_speedkit.architecture import lighten
from lightning_speedkit.architecture.lighten_report import read_plan

ENTRY: dict[str, Any] = {"name": "0", "kind": "low-rank", "groups": 1, "rank": 2, "shape": [8, 16]}


def test_a_report_is_plain_data_and_text() -> None:
    net = nn.Sequential(nn.Linear(32, 32), nn.LSTM(32, 4))
    _, report = lighten(net, torch.zeros(5, 32), rank=4, min_saving=None)
    read = json.loads(json.dumps(report.to_dict()))
    assert read["plan"]["layers"] == [{"name": "0", "kind": "low-rank", "groups": 1, "rank": 4, "shape": [32, 32]}]
    assert read["layers"][0]["multiply_adds_before"] == 5 * 32 * 32
    assert read["layers"][0]["multiply_adds_after"] == 5 * 4 * 64
    assert report.describe().startswith("1 layers replaced, 1 left; parameters 1")
    _, head, row, left = str(report).splitlines()
    assert [word.strip() for word in head.split("|")] == list(report.table().header)
    assert [place for place, sign in enumerate(head) if sign == "|"] == [p for p, sign in enumerate(row) if sign == "|"]
    assert row.startswith("  0     | Linear(in_features=32, out_features=32, bias=True) | low-rank, rank 4 | 0.250 ")
    assert left == "  1 stays: LSTM is not replaced"
    assert report.table().cells()[0][:4] == ("0", "Linear(in_features=32, out_features=32, bias=True)", "low-rank, rank 4", "0.250")  # fmt: skip  # noqa: E501


@pytest.mark.filterwarnings("ignore:lighten.. replaced nothing")
def test_where_nothing_was_replaced_there_are_no_headings() -> None:
    _, report = lighten(nn.Sequential(nn.LSTM(32, 4)), torch.zeros(5, 32), min_saving=None)
    assert str(report).splitlines()[1:] == ["  0 stays: LSTM is not replaced"]


@pytest.mark.parametrize(
    ("plan", "error", "words"),
    [
        ({}, TypeError, "plan is that of a report"),
        (None, TypeError, "plan is that of a report"),
        ({"version": 2, "layers": []}, ValueError, "version 2 is not 1"),
        ({"version": 1, "layers": ["0"]}, TypeError, "does not describe a layer"),
        ({"version": 1, "layers": [{"name": "0"}]}, TypeError, "lacks groups, rank, shape"),
        ({"version": 1, "layers": [{**ENTRY, "name": "9"}]}, ValueError, "'9' of this model cannot be replaced"),
        ({"version": 1, "layers": [{**ENTRY, "name": "1"}]}, ValueError, "cannot be replaced: it has hooks"),
        ({"version": 1, "layers": [{**ENTRY, "shape": [9, 9]}]}, ValueError, r"has the shape \[8, 16\]; the plan is"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(plan: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        read_plan(plan, {"0": nn.Linear(16, 8)}, {"1": "it has hooks"})


def test_a_plan_is_read() -> None:
    assert read_plan({"version": 1, "layers": [ENTRY]}, {"0": nn.Linear(16, 8)}, {}) == {"0": (1, 2)}

from __future__ import annotations

import json

import torch
from torch import nn

from lightning_speedkit.compress.calls import Call
from lightning_speedkit.compress.shrink_report import ShrinkReport, count_flops, count_parameters, measured_sizes


def test_counts_are_those_worked_out_by_hand() -> None:
    conv = nn.Conv2d(3, 8, 3, padding=1)
    assert count_flops(conv, [Call("", (torch.ones(2, 3, 5, 5),), {})]) == 2 * 2 * 25 * 8 * 27
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()  # which takes torch's fast path
    products = 4 * 6 * 8 * 8 + 2 * 6 * 6 * 8 + 2 * 6 * 8 * 16
    assert count_flops(layer, [Call("", (torch.ones(3, 6, 8),), {})]) == 2 * 3 * products
    shared = nn.ModuleList([conv, conv])
    assert count_parameters(shared) == 8 * 27 + 8


def test_two_networks_are_held_against_each_other() -> None:
    calls = [Call("", (torch.ones(4, 6),), {})]
    told = measured_sizes(nn.Linear(6, 4), nn.Linear(6, 2), calls)
    assert (told["parameters_before"], told["parameters_after"]) == (28, 14)
    assert (told["flops_before"], told["flops_after"]) == (2 * 4 * 24, 2 * 4 * 12)
    assert (told["batch_size"], told["threads"]) == (4, torch.get_num_threads())
    assert told["seconds_before_one"] > 0


def test_json_and_numbers_hold_what_was_measured() -> None:
    report = ShrinkReport(
        reason="why",
        layers={"a": [4, 2]},
        parameters_before=2000,
        parameters_after=1000,
        flops_before=2_000_000,
        flops_after=500_000,
        metric="val_acc",
        metric_before=0.9,
        metric_after=0.8,
        metric_drop=float("inf"),
    )
    content = json.loads(report.to_json())
    assert (content["schema"], content["layers"], content["metric_drop"]) == (1, {"a": [4, 2]}, "inf")
    told = report.describe()
    assert told == "Shrunk 1 layers: 2,000 -> 1,000 parameters, 2 -> 0.5 MFLOP, val_acc 0.9 -> 0.8. why"
    assert report.numbers()["shrink/flops_after"] == 500_000.0
    assert "shrink/metric_drop" not in report.numbers()
    assert "shrink/undone" not in report.numbers()


def test_a_run_that_was_shrunk_before_it_was_resumed_is_not_told_as_whole() -> None:
    report = ShrinkReport(layers={"a": [4, 2]}, metric="val_acc", metric_before=0.9, metric_after=0.8)
    assert report.describe() == "Shrunk 1 layers in an earlier part of the run, val_acc 0.9 -> 0.8."

"""The cases of the check on a GPU that make networks smaller: whether they see what is wrong, on the CPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from benchmarks.gpu_cases import pruning, quantization
from benchmarks.gpu_cases.case_run import CaseRun
from benchmarks.gpu_cases.measuring import relative_difference, tensor_bytes
from benchmarks.gpu_cases.registry import CASES
from lightning_speedkit.compress import shrink_model


def test_every_way_to_a_smaller_network_has_a_case() -> None:
    names = {each.name for each in CASES if each.area in ("compress", "architecture")}
    assert names == {
        "2:4 sparsity",
        "Distillation",
        "Pruning 2:4",
        "QuantizeOnFitEnd",
        "StructuredPruning",
        "fp8 inference",
        "int8 inference",
        "lighten",
        "pick_backbone",
    }


def test_a_difference_is_relative_and_infinite_where_a_number_is_not_finite() -> None:
    assert relative_difference(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
    assert relative_difference(torch.tensor([math.nan, 4.0]), torch.tensor([3.0, 4.0])) == math.inf
    assert relative_difference(torch.zeros(2), torch.zeros(2)) == math.inf  # nothing can be said of zeros


def test_bytes_of_shared_weights_count_once() -> None:
    layer = torch.nn.Linear(3, 2)
    assert tensor_bytes(torch.nn.Sequential(layer, layer, torch.nn.BatchNorm1d(2))) == 32 + 4 * 8 + 8


class _Wrapping(torch.Tensor):
    """A tensor that says which plain ones it wraps."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inside", "absent"], None

    inside, absent = torch.zeros(5, dtype=torch.int8), None


def test_bytes_of_a_tensor_that_wraps_others_are_those_of_the_others() -> None:
    module = torch.nn.Module()
    module.register_buffer("weight", torch.zeros(100).as_subclass(_Wrapping))
    assert tensor_bytes(module) == 5


def test_a_case_without_a_scheme_for_the_device_says_why() -> None:
    run = CaseRun(0.0, "cpu", tiny=True)
    quantization.fp8(run)
    assert run.notes == ["fp8 cannot run here: torchao-fp8 is for cuda, not for cpu"]
    assert [check["ok"] for check in run.checks] == [True]


def test_a_quantized_copy_that_is_too_far_off_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "TOLERANCES", {"weight-only-int8": 0.0, "dynamic-int8": 1.0})
    run = CaseRun(0.0, "cpu", tiny=True)
    quantization.int8(run)
    assert [check["name"] for check in run.checks if not check["ok"]] == ["weight-only-int8: outputs"]


def test_pruning_channels_that_are_not_the_zero_ones_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_ones(model: torch.nn.Module, example: Any, ratio: float) -> Any:
        return shrink_model(model, example, ratio, criterion="random")

    monkeypatch.setattr(pruning, "shrink_model", first_ones)
    run = CaseRun(0.0, "cpu", tiny=True)
    pruning.channels(run)
    assert [check["name"] for check in run.checks if not check["ok"]] == ["outputs without the zero channels"]

from __future__ import annotations

import json
import random
import warnings
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from lightning_speedkit.architecture.backbone_table import Backbone, BackboneTable

NAMES = ("torchvision:a", "torchvision:b", "torchvision:c", "torchvision:d")


def row(name: str, latency: float | None = None, memory: float | None = None, **more: Any) -> Backbone:
    more = {"latency_ms": latency, "training_memory_mib": memory, **more}
    return Backbone(name=name, task_shape=(3, 8, 8), num_classes=10, **more)


def test_order_within_the_budget_over_it_and_failed() -> None:
    rows = (
        row("failed", error="boom"),
        row("far", 30.0, 1.0),
        row("near", 11.0, 1.0),
        row("second", 9.0, 1.0),
        row("first", 3.0, 1.0),
    )
    table = BackboneTable(rows=rows, budget={"max_latency_ms": 10.0})
    assert table.names == ("first", "second", "near", "far", "failed")
    assert table.note(table["near"]) == "latency of one image 11.0 ms, max_latency_ms=10"
    assert table.note(table["failed"]) == "boom"
    with pytest.raises(KeyError, match="Did you mean 'second'"):
        _ = table["secnd"]


def test_more_throughput_is_better() -> None:
    rows = tuple(row(str(n), training_samples_per_second=float(n)) for n in (5, 9, 7))
    assert BackboneTable(rows=rows, objective="training").names == ("9", "7", "5")


def test_a_cost_that_is_not_known_does_not_keep_its_limit() -> None:
    table = BackboneTable(rows=(row("a", 3.0),), budget={"max_training_memory_mib": 5.0})
    with pytest.raises(
        ValueError, match="nearest is a: peak memory of training not known here, max_training_memory_mib=5"
    ):
        _ = table.best


def test_what_was_not_measured_further_is_told_of_the_known_limit_only() -> None:
    one = row("a", parameters=20)
    assert one.excess({"max_parameters": 10.0, "max_latency_ms": 1.0}) == {"max_parameters": 2.0}


@pytest.mark.parametrize("accuracies", [False, True])
def test_the_front_is_what_nothing_beats(accuracies: bool) -> None:
    draw = random.Random(1)
    values = [(draw.randrange(1, 9), draw.randrange(1, 9)) for _ in range(30)]
    if accuracies:
        rows = [row(str(n), float(x)) for n, (x, _) in enumerate(values)]
        table = BackboneTable(rows=tuple(rows)).with_accuracies({str(n): float(-y) for n, (_, y) in enumerate(values)})
    else:
        table = BackboneTable(rows=tuple(row(str(n), float(x), float(y)) for n, (x, y) in enumerate(values)))
    expected = set()
    for number, (x, y) in enumerate(values):
        worse = [(a < x and b <= y) or (a <= x and b < y) for a, b in values]
        if not any(worse):
            expected.add(str(number))
    assert {one.name for one in table.pareto} == expected
    costs = [one.latency_ms for one in table.pareto]
    assert costs == sorted(costs)
    assert table.axes == ("latency_ms", "accuracy" if accuracies else "training_memory_mib")


def test_the_front_is_within_the_budget_and_measured() -> None:
    rows = (row("a", 5.0, 5.0), row("over", 1.0, 50.0), row("unknown", 1.0), row("failed", 1.0, 1.0, error="boom"))
    table = BackboneTable(rows=rows, budget={"max_training_memory_mib": 10.0}, objective="memory")
    assert [one.name for one in table.pareto] == ["a"]
    assert table.axes == ("training_memory_mib", "latency_ms")


def test_accuracies_order_and_are_merged() -> None:
    table = BackboneTable(rows=tuple(row(name, float(n), 1.0) for n, name in enumerate(NAMES, 1)))
    scored = table.with_accuracies({NAMES[2]: 0.9, NAMES[1]: 0.9, NAMES[3]: 0.2})
    assert scored.names == (NAMES[1], NAMES[2], NAMES[3], NAMES[0])
    assert scored.with_accuracies({NAMES[0]: 0.95}).names == (NAMES[0], NAMES[1], NAMES[2], NAMES[3])
    assert table[NAMES[1]].accuracy is None
    assert "accuracy" in str(scored)
    assert "accuracy" not in str(table)
    with pytest.raises(ValueError, match=r"'torchvision:aa' is not a candidate\. Did you mean 'torchvision:a'"):
        table.with_accuracies({"torchvision:aa": 1.0})
    with pytest.raises(ValueError, match="nan of 'torchvision:a' is not a finite number"):
        table.with_accuracies({NAMES[0]: float("nan")})


def test_json_holds_all_of_it() -> None:
    rows = (row("a", 1.5, 2.0, parameters=3, accuracy=0.5), row("b", error="boom"))
    table = BackboneTable(rows=rows, budget={"max_latency_ms": 2.0}, device_name="a CPU", versions={"torch": "2"})
    assert BackboneTable.from_json(table.to_json()) == table
    assert json.loads(table.to_json())["rows"][0]["latency_ms"] == 1.5


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": "backbones", "schema_version": 2, "rows": []}'])
def test_json_of_something_else(text: str) -> None:
    with pytest.raises(ValueError, match="not a table of backbones"):
        BackboneTable.from_json(text)


def test_text_has_a_line_for_each_and_units() -> None:
    told = str(
        BackboneTable(rows=(row("a", 1.5, 2.0, parameters=2_500_000), row("b", error="boom")), device_name="a CPU")
    )
    lines = told.splitlines()
    assert lines[0] == "Measured on a CPU, 1 thread(s)"
    assert lines[2].split()[:4] == ["a", "2.50", "–", "1.50"]
    assert lines[3].split()[-1] == "boom"


@pytest.mark.skipif(find_spec("torchvision") is None, reason="builds a network of torchvision")
def test_a_row_is_data_that_builds_the_network() -> None:
    one = Backbone(name="torchvision:mobilenet_v3_small", task_shape=(1, 16, 16), num_classes=4)
    assert one.build().eval()(torch.zeros(1, 1, 16, 16)).shape == (1, 4)
    config = json.loads(json.dumps(one.part.config()))
    assert config["class_path"].endswith("build_backbone")
    assert config["init_args"] == {"name": one.name, "task_shape": [1, 16, 16], "num_classes": 4}
    assert one.part.build().eval()(torch.zeros(1, 1, 16, 16)).shape == (1, 4)


@pytest.mark.skipif(find_spec("torchvision") is None, reason="builds a network of torchvision")
def test_the_config_is_what_a_yaml_takes() -> None:
    from jsonargparse import ArgumentParser

    one = Backbone(name="torchvision:mobilenet_v3_small", task_shape=(1, 16, 16), num_classes=4)
    parser = ArgumentParser()
    parser.add_argument("--net", type=torch.nn.Module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer versions have another name for it
        made = parser.instantiate_classes(parser.parse_object({"net": one.part.config()}))
    assert made.net.classifier[-1].out_features == 4

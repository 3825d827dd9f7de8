"""Which of several copies is kept: with engines and times that the test decides on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import lightning_speedkit.compress.selection as selection_module
from lightning_speedkit.compress.selection import fewest
from lightning_speedkit.compress.trial import Plan, try_quantized
from tests.compress.fakes import FakeEngine, answering, rounded_to
from tests.compress.models import Digits, digit_loader, digits, mlp

FLOAT = 0.010
FLOAT_TIMES: tuple[float | None, float | None] = (FLOAT, FLOAT / 10)


def _three_layers() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Tries a module with these engines, each with the seconds that it takes for a batch."""

    def run(
        engines: dict[FakeEngine, float],
        module: Any = None,
        *,
        beside: FakeEngine | None = None,
        drop: float = 0.01,
        **plan: Any,
    ) -> Any:
        seconds = {engine.name: taken for engine, taken in engines.items()}

        def time_all(baseline: Any, candidates: Any, calls: Any, device: str) -> tuple[float | None, float | None]:
            for candidate in candidates:
                if candidate.usable:
                    more = 0.001 * len(candidate.report.float_layers)
                    taken = seconds[candidate.engine.name] + more
                    candidate.report = replace(candidate.report, seconds_batch=taken, seconds_one=taken / 10)
            return FLOAT_TIMES

        monkeypatch.setattr(selection_module, "time_all", time_all)
        monkeypatch.setattr(
            "lightning_speedkit.compress.trial.planned_engines", lambda plan: [e for e in engines if e is not beside]
        )
        monkeypatch.setattr("lightning_speedkit.compress.trial.float_engine", lambda engine: beside)
        from lightning_speedkit.compress.judge import Judge, ValidationData

        module = module or Digits(mlp())
        data = ValidationData(loaders=digit_loader(1024, 1088, 32))
        batches = [[x, y] for x, y in digit_loader(0, 64, 32)]
        return try_quantized(module, batches, data, Judge(max_metric_drop=drop), Plan(**plan))

    return run


def _outcomes(report: Any) -> dict[str, str]:
    return {candidate.backend: candidate.outcome for candidate in report.candidates}


def test_the_fastest_that_is_faster_than_float_is_kept(run: Callable[..., Any]) -> None:
    engines = {FakeEngine("a"): 0.008, FakeEngine("b"): 0.004, FakeEngine("c"): 0.011}
    kept, report = run(engines)
    assert kept.engine == report.backend == "b"
    assert report.kept
    assert _outcomes(report) == {"a": "not needed", "b": "kept", "c": "not needed"}
    assert (report.seconds_before_batch, report.seconds_after_batch) == (FLOAT, 0.004)
    assert (report.seconds_before_one, report.seconds_after_one) == (FLOAT / 10, pytest.approx(0.0004))


def test_none_is_kept_that_is_not_faster_than_float(run: Callable[..., Any]) -> None:
    kept, report = run({FakeEngine("a"): FLOAT, FakeEngine("b"): 0.011})
    assert kept is None
    assert not report.kept
    assert _outcomes(report) == {"a": "slower", "b": "slower"}
    assert "The model stays in float. a: 10 ms for a batch; float32 takes 10 ms. b: 11 ms" in report.reason
    assert report.bytes_after is not None


def test_a_gain_that_may_be_noise_is_none(run: Callable[..., Any]) -> None:
    kept, report = run({FakeEngine("a"): 0.98 * FLOAT, FakeEngine("b"): 0.975 * FLOAT})
    assert kept is None
    assert _outcomes(report) == {"a": "slower", "b": "slower"}
    assert "b: 9.75 ms for a batch; float32 takes 10 ms, and a gain below 3% may be noise." in report.reason


def test_where_float_in_the_same_runtime_is_faster_that_is_kept_and_said(run: Callable[..., Any]) -> None:
    beside = FakeEngine("runtime-float32", "float32")
    kept, report = run({FakeEngine("runtime-static"): 0.004, beside: 0.003}, beside=beside)
    assert kept.engine == "runtime-float32"
    assert (report.scheme, report.layers_quantized) == ("float32", ())
    assert _outcomes(report) == {"runtime-static": "slower", "runtime-float32": "kept"}
    assert "No quantized copy is kept. runtime-static: 4 ms for a batch; runtime-float32 takes 3 ms." in report.reason
    assert report.describe().startswith("Kept in float32, in another runtime (runtime-float32)")


def test_float_in_a_runtime_that_is_slower_than_torch_is_not_kept(run: Callable[..., Any]) -> None:
    beside = FakeEngine("runtime-float32", "float32")
    kept, report = run({FakeEngine("runtime-static"): 0.02, beside: 0.015}, beside=beside)
    assert kept is None
    assert _outcomes(report) == {"runtime-static": "slower", "runtime-float32": "slower"}


def test_size_takes_the_smallest_and_says_that_it_is_slower(run: Callable[..., Any]) -> None:
    beside = FakeEngine("runtime-float32", "float32")
    engines = {FakeEngine("large", size=900): 0.001, FakeEngine("small", size=500): 0.02, beside: 0.001}
    kept, report = run(engines, beside=beside, objective="size")
    assert kept.engine == "small"
    assert report.bytes_after == 500
    assert _outcomes(report) == {"large": "not needed", "small": "kept", "runtime-float32": "not needed"}
    assert report.notes == ("It is not faster: 10 -> 20 ms for a batch.",)


def test_size_keeps_none_that_is_not_smaller(run: Callable[..., Any]) -> None:
    kept, report = run({FakeEngine("a", size=10**7): 0.001}, objective="size")
    assert kept is None
    assert _outcomes(report) == {"a": "not smaller"}
    assert f"its files take 10000000 bytes, the float state {report.bytes_before}" in report.reason


def test_what_fails_or_is_missing_is_told_and_the_next_one_is_kept(run: Callable[..., Any]) -> None:
    engines = {
        FakeEngine("breaks", fails=ZeroDivisionError("no\nexport")): 0.001,
        FakeEngine("missing", why_missing="pip install 'lightning-speedkit[quant]'"): 0.001,
        FakeEngine("wrong", change=answering(lambda _, plain, x: plain(x) * 0)): 0.001,
        FakeEngine("good"): 0.005,
    }
    kept, report = run(engines)
    assert kept.engine == "good"
    assert _outcomes(report) == {"breaks": "failed", "missing": "missing", "wrong": "no calibration", "good": "kept"}
    reasons = {candidate.backend: candidate.reason for candidate in report.candidates}
    assert reasons["breaks"] == "ZeroDivisionError: no export"
    assert reasons["missing"] == "pip install 'lightning-speedkit[quant]'"
    assert reasons["wrong"].startswith("no calibration: ")


def test_engines_that_write_none_of_the_formats_are_left_out(run: Callable[..., Any]) -> None:
    engines = {FakeEngine("a", formats=("onnx",)): 0.001, FakeEngine("b", formats=("state_dict", "pt2")): 0.002}
    kept, report = run(engines, formats=["pt2"])
    assert kept.engine == "b"
    assert report.candidates[0].reason == "it writes onnx, not pt2"


class _Notices(Digits):
    """Its accuracy falls by 0.1 for each of the layers in ``dear`` that is quantized."""

    def __init__(self, dear: tuple[str, ...]) -> None:
        super().__init__(_three_layers())
        self.dear = dear

    def _log(self, name: str, batch: Any) -> None:
        self(batch[0])
        now = getattr(self, "quantized_layers", ())
        self.log(f"{name}_acc", 0.9 - 0.1 * len(set(now) & set(self.dear)))


def _hurting_second_and_third(module: Any) -> None:
    torch.manual_seed(0)
    with torch.no_grad():  # one value that sets the scale of each row: what is left of the others is little
        module.net[3].weight[:, 0] *= 300
        module.net[5].weight[:, 0] *= 10


def test_the_layers_that_hurt_most_go_back_to_float_until_the_metric_holds(run: Callable[..., Any]) -> None:
    module, engine = _Notices(("net.3", "net.5")), FakeEngine("a")
    _hurting_second_and_third(module)
    kept, report = run({engine: 0.002}, module)
    assert report.kept
    assert list(report.sensitivity)[:2] == ["net.3", "net.5"]
    assert report.float_layers == ("net.3", "net.5")
    assert kept.quantized == report.layers_quantized == ("net.1",)
    assert report.skipped == dict.fromkeys(("net.3", "net.5"), "left in float to save the metric")
    assert "In float to save it: net.3, net.5." in report.reason
    assert (report.metric_before, report.metric_after) == (pytest.approx(0.9), pytest.approx(0.9))
    assert report.seconds_after_batch == pytest.approx(0.004)  # timed again, with two layers more in float
    assert report.bytes_after == 100 + 2 * 400
    assert engine.made == [("net.1", "net.3", "net.5"), ("net.1", "net.5"), ("net.1",)]


def test_where_the_layers_in_float_eat_up_the_gain_it_is_not_kept(run: Callable[..., Any]) -> None:
    module = _Notices(("net.3",))
    _hurting_second_and_third(module)
    kept, report = run({FakeEngine("a"): 0.0095}, module)
    assert kept is None
    assert _outcomes(report) == {"a": "slower"}


def test_a_better_metric_is_told_as_a_gain(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection_module, "measured_metrics", lambda *_: ({"val_acc": 0.9}, 1))
    monkeypatch.setattr("lightning_speedkit.compress.trial.measured_metrics", lambda *_: ({"val_acc": 0.875}, 1))
    _, report = run({FakeEngine("a"): 0.002})
    assert report.reason == "val_acc went from 0.875 to 0.9: a gain of 0.025, within max_metric_drop=0.01."
    assert report.metric_drop == pytest.approx(-0.025)


def test_a_tolerance_that_nothing_meets_leaves_the_float_model_and_says_by_how_much(run: Callable[..., Any]) -> None:
    module, engine = _Notices(("net.1", "net.3", "net.5")), FakeEngine("a")
    kept, report = run({engine: 0.002}, module, drop=0.05)
    assert kept is None
    assert _outcomes(report) == {"a": "metric"}
    assert "val_acc went from 0.9 to 0.6: a drop of 0.3, 0.25 over max_metric_drop=0.05." in report.reason
    assert "With 2 layers in float: val_acc went from 0.9 to 0.8: a drop of 0.1, 0.05 over" in report.reason
    assert report.metric_after == pytest.approx(0.6)
    assert len(engine.made) == 3


def test_layers_stay_quantized_if_that_is_asked(run: Callable[..., Any]) -> None:
    engine = FakeEngine("a")
    kept, _ = run({engine: 0.002}, _Notices(("net.3",)), accuracy_aware=False)
    assert kept is None
    assert len(engine.made) == 1


def test_layers_named_in_skip_stay_in_float_too(run: Callable[..., Any]) -> None:
    module, engine = _Notices(("net.3",)), FakeEngine("a")
    _hurting_second_and_third(module)
    _, report = run({engine: 0.002}, module, skip=["net.5"])
    assert engine.made == [("net.1", "net.3"), ("net.1",)]
    assert report.skipped == {"net.3": "left in float to save the metric", "net.5": "named in skip"}


def test_a_saturated_layer_goes_back_to_float(run: Callable[..., Any]) -> None:
    def saturates(network: Any, layers: tuple[str, ...]) -> None:
        if "net.3" in layers:
            answering(lambda _, plain, x: plain(x) + 0.5 * plain(x).abs().mean() * noise)(network, layers)

    torch.manual_seed(0)
    noise, module = torch.randn(10), Digits(_three_layers())
    with torch.no_grad():
        module.net[3].weight[:, 0] *= 8
    kept, report = run({FakeEngine("a", change=saturates): 0.002}, module, drop=1.0)
    assert kept is not None
    assert report.float_layers == ("net.3",)
    kept, report = run({FakeEngine("a", change=saturates): 0.002}, module, drop=1.0, accuracy_aware=False)
    assert kept is None
    assert _outcomes(report) == {"a": "saturation"}


def test_a_copy_that_really_loses_accuracy_is_measured(run: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    module = Digits(mlp())
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    x, y = digits()
    for _ in range(30):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x[:512]), y[:512]).backward()
        optimizer.step()
    _, report = run({FakeEngine("coarse", "weight-only-int4", rounded_to(0.15)): 0.001}, module, drop=1.0)
    x, y = (torch.cat(part) for part in zip(*digit_loader(1024, 1088, 32), strict=True))
    rounded_to(0.15)(module.eval(), ("net.1", "net.3"))
    with torch.no_grad():
        assert report.metric_after == pytest.approx(float((module(x).argmax(1) == y).float().mean()))
    assert report.metric_after < report.metric_before


@pytest.mark.parametrize("most", [0, 1, 2, 3, 7, 16, 40])
def test_fewest_finds_the_smallest_count_with_enough_trials(most: int) -> None:
    for threshold in range(1, most + 2):
        asked: list[int] = []

        def holds(count: int, threshold: int = threshold, asked: list[int] = asked) -> bool:
            asked.append(count)
            return count >= threshold

        assert fewest(most, holds, trials=50) == (threshold if threshold <= most else None)
        assert all(1 <= count <= most for count in asked)
        assert len(asked) == len(set(asked)) <= 9


def test_fewest_stops_after_its_trials_with_the_smallest_that_it_knows() -> None:
    asked: list[int] = []
    assert fewest(8, lambda count: asked.append(count) or count >= 5, trials=5) == 6
    assert asked == [1, 2, 4, 8, 6]
    assert fewest(8, lambda count: count >= 5, trials=3) is None


def test_where_the_float_network_cannot_be_timed_nothing_is_called_faster(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.FLOAT_TIMES", (None, None))
    made, report = run({FakeEngine("a"): 0.001})
    assert made is None
    assert report.candidates[0].outcome == "slower"
    assert "the float network could not be timed" in report.reason

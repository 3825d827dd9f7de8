"""The pieces that quantization is put together from."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_speedkit.compress import QuantizationReport, load_quantized, quantize_model, save_quantized
from lightning_speedkit.compress.artefact import publish
from lightning_speedkit.compress.calls import Call, first_sample, inside_metrics, record_calls, replay
from lightning_speedkit.compress.float_copy import fingerprint, float_copy
from lightning_speedkit.compress.presets import PRESETS
from lightning_speedkit.compress.quality import metric_drop, paired_seconds, relative_error, serialized_bytes
from lightning_speedkit.compress.trial import Judge
from lightning_speedkit.errors import QuantizationError
from tests.compress.models import Digits, mlp, quiet_trainer


class TestFloatCopy:
    def test_shares_no_memory_and_leaves_the_trainer_behind(self) -> None:
        model = Digits(mlp())
        model.trainer = quiet_trainer()
        model.lock = threading.Lock()
        twin = float_copy(model)
        assert twin._trainer is None
        assert twin.lock is model.lock
        pointers = {p.data_ptr() for p in model.parameters()}
        assert pointers.isdisjoint(p.data_ptr() for p in twin.parameters())
        assert fingerprint(twin) == fingerprint(model)

    def test_a_data_set_on_the_module_is_not_copied(self) -> None:
        model = nn.Linear(1, 1)
        model.data = torch.utils.data.TensorDataset(torch.zeros(10))  # type: ignore[assignment]
        assert float_copy(model).data is model.data

    @pytest.mark.parametrize("change", ["weight", "buffer", "dtype"])
    def test_fingerprint_sees_every_change(self, change: str) -> None:
        model = nn.BatchNorm1d(3)
        before = fingerprint(model)
        assert before == fingerprint(model)
        if change == "weight":
            model.weight.data[1] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
        elif change == "buffer":
            model.num_batches_tracked.add_(1)
        else:
            model.double()
        assert fingerprint(model) != before


class TestCalls:
    def test_an_exception_leaves_no_hook_and_no_depth(self) -> None:
        net = nn.Sequential(nn.Linear(2, 2))
        with record_calls(net) as calls:
            with pytest.raises(RuntimeError):
                net(torch.ones(1, 3))
            net(torch.ones(5, 2))
        assert [(c.name, tuple(c.args[0].shape)) for c in calls] == [("", (1, 3)), ("", (5, 2))]
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())

    def test_networks_inside_metrics_are_not_the_network(self) -> None:
        class Distance(Metric):
            def __init__(self) -> None:
                super().__init__()
                self.net = nn.Linear(2, 2)
                self.add_state("total", torch.tensor(0.0))

            def update(self, x: Tensor) -> None:
                self.total += self.net(x).sum()

            def compute(self) -> Tensor:
                return self.total

        root = nn.ModuleDict({"net": nn.Linear(2, 2), "metric": Distance()})
        assert inside_metrics(root) == {"metric", "metric.net"}
        with record_calls(root) as calls:
            root["metric"].update(root["net"](torch.ones(1, 2)))
        assert [call.name for call in calls] == ["net"]

    def test_first_sample_cuts_what_has_the_length_of_the_batch(self) -> None:
        call = Call(
            "", (torch.zeros(4, 3), [torch.zeros(4)]), {"table": torch.zeros(7, 3), "scalar": torch.tensor(1.0)}
        )
        one = first_sample(call)
        assert [tuple(t.shape) for t in (one.args[0], one.args[1][0], *one.kwargs.values())] == [
            (1, 3),
            (1,),
            (7, 3),
            (),
        ]

    def test_replay_draws_the_same_numbers_and_leaves_the_generator(self) -> None:
        before = torch.get_rng_state()
        call = [Call("", (torch.ones(100),), {})]
        dropout = nn.Dropout(0.5)
        torch.testing.assert_close(replay(dropout, call), replay(dropout, call), rtol=0, atol=0)
        torch.testing.assert_close(torch.get_rng_state(), before, rtol=0, atol=0)


class TestQuality:
    def test_relative_error(self) -> None:
        a, b = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 0.0])
        assert relative_error([a, b], [a, b]) == 0.0
        assert relative_error([a], [b]) == 1.0
        assert relative_error([b], [a]) == math.inf
        assert relative_error([a], [torch.tensor([3.0, math.nan])]) == math.inf
        assert relative_error([a], [a, a]) == math.inf
        assert relative_error([a], [torch.zeros(3)]) == math.inf

    @pytest.mark.parametrize(
        ("before", "after", "mode", "drop"),
        [
            (0.9, 0.89, "max", 0.01),
            (90.0, 89.1, "max", 0.01),
            (0.9, 0.95, "max", -0.05),
            (0.5, 0.55, "min", 0.1),
            (2.0, 1.0, "min", -0.5),
            (-2.0, -1.0, "min", 0.5),
            (0.0, 0.0, "min", 0.0),
            (0.0, 0.1, "min", math.inf),
            (0.9, math.nan, "max", math.inf),
            (0.9, -math.inf, "min", math.inf),
        ],
    )
    def test_metric_drop(self, before: float, after: float, mode: str, drop: float) -> None:
        assert metric_drop(before, after, mode) == pytest.approx(drop)

    def test_serialized_bytes_are_those_of_the_file(self, tmp_path: Path) -> None:
        state = mlp().state_dict()
        torch.save(dict(state), tmp_path / "state.pt")
        assert serialized_bytes(state) == pytest.approx((tmp_path / "state.pt").stat().st_size, rel=0.02)

    def test_pairs_alternate_and_are_bounded(self) -> None:
        order: list[str] = []
        paired_seconds(lambda: order.append("a"), lambda: order.append("b"), budget_seconds=0.0)
        assert order == ["a", "b"] * 6  # one pair to warm up, then at least five
        order.clear()
        paired_seconds(lambda: order.append("a"), lambda: order.append("b"), budget_seconds=60.0, at_most=7)
        assert len(order) == 16


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


class TestArtefact:
    def test_another_structure_is_a_clear_error_and_the_module_untouched(self, tmp_path: Path) -> None:
        int8, details = quantize_model(mlp(), [torch.rand(4, 1, 8, 8)])
        save_quantized(int8, details.recipe, tmp_path / "model.pt")
        for other in (nn.Linear(2, 2), nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))):
            before = fingerprint(other)
            with pytest.raises(QuantizationError, match=r"does not fit a \w+ like this one .* Pass a float model with"):
                load_quantized(tmp_path, other)
            assert fingerprint(other) == before

    def test_another_format_is_refused(self, tmp_path: Path) -> None:
        torch.save({"format": 99}, tmp_path / "model.pt")
        with pytest.raises(QuantizationError, match="has format 99; this version reads format 1"):
            load_quantized(tmp_path / "model.pt", mlp())

    def test_a_failed_write_leaves_the_old_file_and_no_other(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        publish(path, lambda temporary: temporary.write_text("old"))

        def fail(temporary: Path) -> None:
            temporary.write_text("half")
            raise OSError("disk full")

        with pytest.raises(OSError, match="disk full"):
            publish(path, fail)
        assert [p.name for p in tmp_path.iterdir()] == ["file"]
        assert path.read_text() == "old"

    def test_layers_left_in_float_are_left_in_float_again(self, tmp_path: Path) -> None:
        def net() -> nn.Module:
            circular = nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")
            return nn.Sequential(
                nn.Conv2d(1, 4, 3), circular, nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 2, 3)
            )

        x = torch.rand(4, 1, 8, 8)
        int8, details = quantize_model(net(), [x], skip=["4"])
        assert (details.backend, details.layers_quantized) == ("fx_static", ("0", "3"))
        assert details.skipped == {"1": "padding_mode='circular' has no int8 version", "4": "named in skip"}
        save_quantized(int8, details.recipe, tmp_path / "model.pt")
        torch.testing.assert_close(load_quantized(tmp_path, net())(x), int8(x), rtol=0, atol=0)

    def test_weights_of_another_training_are_replaced(self, tmp_path: Path) -> None:
        int8, details = quantize_model(mlp(), [torch.rand(4, 1, 8, 8)])
        save_quantized(int8, details.recipe, tmp_path / "model.pt")
        torch.manual_seed(99)
        x = torch.rand(7, 1, 8, 8)
        torch.testing.assert_close(load_quantized(tmp_path, mlp())(x), int8(x), rtol=0, atol=0)


def test_report_is_valid_json_whatever_it_holds() -> None:
    report = QuantizationReport(kept=False, reason="x", metric_after=math.nan, metric_drop=math.inf, skipped={"a": "b"})
    values = json.loads(report.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (values["metric_after"], values["metric_drop"], values["skipped"]) == ("nan", "inf", {"a": "b"})


def test_preset_builds_a_new_callback_each_time() -> None:
    (preset,) = PRESETS
    assert (preset.name, preset.kind) == ("quantize-int8", "compress")
    (part,) = preset.patch.callbacks  # type: ignore[union-attr]
    assert part.build() is not part.build()
    assert part.build().report is None

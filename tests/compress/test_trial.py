"""A trained module is tried with real engines of torch: what the report says is what anyone measures."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_speedkit.compress.candidates import float_as_it_runs
from lightning_speedkit.compress.float_copy import fingerprint, float_copy
from lightning_speedkit.compress.judge import Judge, ValidationData
from lightning_speedkit.compress.torch_ao import is_quantized
from lightning_speedkit.compress.trial import Plan, planned_engines, try_quantized
from lightning_speedkit.errors import QuantizationError
from tests.compress.models import ConvNet, Digits, digit_loader, mlp


def _batches(count: int = 2) -> list[Any]:
    return [[x, y] for x, y in digit_loader(0, 32 * count, 32)]


def _data(start: int = 1024, stop: int = 1152) -> ValidationData:
    return ValidationData(loaders=digit_loader(start, stop, 32))


def _try(
    module: LightningModule, data: ValidationData | None = None, backend: str = "torch-ao-dynamic", **judge: Any
) -> Any:
    plan = Plan(backend=backend, objective="size")
    return try_quantized(module, _batches(), data, Judge(**judge), plan)


def test_the_report_tells_what_the_metric_was_for_both() -> None:
    module = Digits(ConvNet())
    before = fingerprint(module)
    made, report = _try(module, _data(), "torch-ao-static", max_metric_drop=1.0)
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
    assert [candidate.outcome for candidate in report.candidates] == ["kept"]
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
    assert "torch-ao-dynamic: Quantized: Validation failed (KeyError: 'no int8 here')." in report.reason
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


def test_a_float_module_that_changed_is_an_error_with_the_name_of_the_trap() -> None:
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
    with pytest.raises(QuantizationError, match="in-place corruption: the float model changed while it was quantized"):
        _try(module)


def test_a_lazy_layer_that_was_never_called_is_named() -> None:
    class Lazy(Digits):
        def __init__(self) -> None:
            super().__init__(mlp())
            self.spare = nn.LazyLinear(3)

    made, report = _try(Lazy())
    assert made is None
    assert report.reason.startswith("'spare.weight' of Lazy has no shape yet")
    assert "Run the module once on a batch" in report.reason


def test_weights_that_two_layers_share_are_quantized_in_both() -> None:
    class Tied(Digits):
        def __init__(self) -> None:
            super().__init__(
                nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 10))
            )
            self.net[3].weight = self.net[1].weight

    torch.manual_seed(0)
    module = Tied().eval()
    made, report = _try(module)
    assert made is not None
    assert report.layers_quantized == ("net.1", "net.3", "net.4")
    x = _batches()[0][0]
    with torch.no_grad():
        expected, got = module(x), made.module(x)
    assert float((got - expected).norm() / expected.norm()) < 0.05
    assert module.net[3].weight is module.net[1].weight


def test_keyword_arguments_and_dict_batches() -> None:
    class Named(Digits):
        def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
            return self.net(x) * scale

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return nn.functional.cross_entropy(self(x=batch["x"], scale=batch["scale"]), batch["y"])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.training_step(batch, batch_idx))

    rows = [{"x": x, "y": y, "scale": torch.tensor(2.0)} for x, y in _batches()]
    data = ValidationData(loaders=torch.utils.data.DataLoader(rows, batch_size=None))  # type: ignore[arg-type]
    module = Named(mlp())
    plan = Plan(backend="torch-ao-dynamic", objective="size")
    made, report = try_quantized(module, rows, data, Judge(max_metric_drop=1.0), plan)
    assert made is not None
    assert report.metric == "val_loss"
    assert report.relative_error < 0.05


def test_the_float_network_is_timed_with_the_fused_attention_that_its_user_has() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 1)

    module = Encoder().eval()
    floating = float_copy(module)
    baseline = float_as_it_runs(module, floating, "cpu")
    kept = [part.activation_relu_or_gelu for part in baseline.modules() if isinstance(part, nn.TransformerEncoderLayer)]
    assert kept == [1]
    assert floating.encoder.layers[0].activation_relu_or_gelu == 0
    assert baseline.encoder.use_nested_tensor is module.encoder.use_nested_tensor


def test_planned_engines() -> None:
    assert [engine.name for engine in planned_engines(Plan(backend="torch-ao-dynamic"))] == ["torch-ao-dynamic"]
    assert all(engine.scheme == "static-int8" for engine in planned_engines(Plan(scheme="static-int8")))
    fast = [engine.name for engine in planned_engines(Plan())]
    small = [engine.name for engine in planned_engines(Plan(objective="size"))]
    assert "torchao-weight-int8" not in fast
    assert "torchao-weight-int8" in small
    assert small[: len(fast)] == fast


def test_a_raw_parameter_beside_layers_is_not_counted() -> None:
    module = Digits(mlp())
    module.positions = nn.Parameter(torch.zeros(1, 64))
    made, report = _try(module, _data(), max_metric_drop=1.0)
    assert made is not None
    assert (report.layers_total, report.layers_quantized, dict(report.skipped)) == (2, ("net.1", "net.3"), {})
    assert ": 2 of 2 layers" in report.describe()


class _Labelled(LightningModule):
    """Its step calls ``self(**batch)`` with the labels, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.net(x.flatten(1))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self(**batch)["loss"])


@pytest.mark.parametrize(
    ("backend", "needs_labels"),
    [("onnxruntime-static", True), ("torch-ao-static", True), ("torch-ao-dynamic", False)],
)
def test_a_copy_that_needs_the_labels_of_the_step_says_so_in_the_report_and_when_called(
    backend: str, needs_labels: bool
) -> None:
    if backend.startswith("onnx"):
        pytest.importorskip("onnxruntime")
    batches = [{"x": x, "labels": y} for x, y in digit_loader(0, 64, 32)]
    made, report = try_quantized(_Labelled(), batches, None, Judge(), Plan(backend=backend, objective="size"))
    assert made is not None, report.reason
    told = [note for note in report.notes if note.startswith("It cannot be called without labels")]
    assert len(told) == needs_labels
    if not needs_labels:
        assert list(made.module(batches[0]["x"])) == ["logits"]
        return
    assert "backend='torch-ao-dynamic'" in told[0]
    with pytest.raises(ValueError, match=r": labels is missing\. .*zeros.*backend='torch-ao-dynamic'") as refusal:
        made.module(batches[0]["x"])
    assert str(refusal.value).endswith("called like the float model.")
    with_zeros = made.module(batches[0]["x"], torch.zeros(32, dtype=torch.long))
    torch.testing.assert_close(with_zeros["logits"], made.module(**batches[0])["logits"], rtol=0, atol=0)

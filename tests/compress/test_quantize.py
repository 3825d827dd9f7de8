"""Quantization at the end of a fit: what is kept, what is told, and what is left as it was."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, WeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

import lightning_speedkit.compress.quantize as quantize
from lightning_speedkit.compress import QuantizationReport, QuantizeOnFitEnd, load_quantized
from lightning_speedkit.compress.float_copy import fingerprint
from lightning_speedkit.compress.torch_ao import is_quantized
from tests.compress.models import (
    ConvNet,
    Digits,
    DirectDigits,
    RowReader,
    digit_loader,
    digits,
    mlp,
    quiet_trainer,
)
from tests.preloaded import start_forked
from tests.two_ranks import on_two_ranks


def _callback(backend: str | None = "torch-ao-dynamic", **arguments: Any) -> QuantizeOnFitEnd:
    """One that does not depend on how fast this machine is, and whose engine takes little time."""
    return QuantizeOnFitEnd(**{"backend": backend, "objective": "size", **arguments})


def _fit(model: LightningModule, callback: QuantizeOnFitEnd, **arguments: Any) -> Any:
    trainer = quiet_trainer(callbacks=[callback, *arguments.pop("callbacks", [])], **arguments)
    trainer.fit(model, digit_loader(0, 1024, shuffle=True), digit_loader(1024, 1408))
    return trainer


def _report(callback: QuantizeOnFitEnd) -> QuantizationReport:
    assert callback.report is not None
    return callback.report


def _accuracy(model: Any, start: int = 1024, stop: int = 1408) -> float:
    with torch.no_grad():  # batch by batch: a dynamic range is that of the whole batch
        right = [(model(x).argmax(1) == y).float() for x, y in digit_loader(start, stop)]
    return float(torch.cat(right).mean())


@pytest.mark.parametrize(
    ("make", "backend", "scheme", "layers"),
    [
        (lambda: Digits(ConvNet()), "torch-ao-static", "static-int8", 3),
        (lambda: DirectDigits(), "torch-ao-static", "static-int8", 2),
        (lambda: Digits(mlp()), "torch-ao-dynamic", "dynamic-int8", 2),
        (lambda: Digits(RowReader()), "torch-ao-dynamic", "dynamic-int8", 2),
    ],
    ids=["conv", "layers on the module", "mlp", "lstm"],
)
def test_trained_digits_are_quantized_measured_and_kept(make: Any, backend: str, scheme: str, layers: int) -> None:
    model, callback = make(), _callback(backend, max_metric_drop=0.02)
    _fit(model, callback)
    report = _report(callback)
    assert report.kept
    assert (report.backend, report.scheme) == (backend, scheme)
    assert (len(report.layers_quantized), report.layers_total) == (layers, layers)
    assert report.skipped == {}
    assert (report.metric, report.metric_mode, report.validation_batches) == ("val_acc", "max", 6)
    # both figures of the report are those that anyone gets who asks the two models
    model.eval()
    assert report.metric_before == pytest.approx(_accuracy(model), abs=1e-6)
    assert report.metric_after == pytest.approx(_accuracy(callback.quantized_model), abs=1e-6)
    assert report.metric_before > 0.5
    assert report.metric_drop == pytest.approx(report.metric_before - report.metric_after)
    assert report.bytes_after < report.bytes_before
    assert report.bytes_after == pytest.approx(Path("quantized/model.pt").stat().st_size, rel=0.02)
    assert 0 < report.relative_error < 0.1
    assert report.calibration_batches == 8
    assert report.batch_size == 64
    times = [
        report.seconds_before_one,
        report.seconds_after_one,
        report.seconds_before_batch,
        report.seconds_after_batch,
    ]
    assert all(seconds > 0 for seconds in times)
    assert report.files == ("manifest.json", "model.pt")
    written = json.loads(Path("quantized/report.json").read_text())
    assert (written["schema"], written["backend"], written["metric_after"]) == (2, backend, report.metric_after)
    assert "Saved in" in report.describe()
    page = Path("quantized/report.html").read_text()
    assert "<svg" in page
    assert all(name in page for name in report.layers_quantized)


def test_training_is_bit_identical_and_the_float_module_untouched() -> None:
    results = []
    for callbacks in ([], [_callback("torch-ao-static")]):
        torch.manual_seed(5)
        model = Digits(ConvNet())
        model.net.conv1.requires_grad_(False)
        trainer = quiet_trainer(callbacks=callbacks)
        trainer.fit(model, digit_loader(0, 256, shuffle=True), digit_loader(1024, 1152))
        results.append((fingerprint(model), torch.get_rng_state(), model.training, model.trainer is trainer))
        assert not model.net.conv1.weight.requires_grad
        assert model.net.conv2.weight.requires_grad
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert results[0][0] == results[1][0]
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=0)
    assert results[0][2:] == results[1][2:]


def test_test_and_best_checkpoint_and_second_fit_work_afterwards() -> None:
    model, callback = DirectDigits(), _callback("torch-ao-static", max_metric_drop=1.0)
    checkpoint = ModelCheckpoint(monitor="val_acc", mode="max")
    trainer = _fit(model, callback, callbacks=[checkpoint], enable_checkpointing=True)
    loader = digit_loader(1408, 1792)
    plain = trainer.test(model, loader, verbose=False)[0]["test_acc"]
    assert plain == pytest.approx(_accuracy(model.eval(), 1408, 1792), abs=1e-6)
    assert trainer.test(ckpt_path="best", dataloaders=loader, verbose=False)[0]["test_acc"] > 0.5
    trainer.save_checkpoint("after.ckpt")
    assert set(torch.load("after.ckpt", weights_only=True)["state_dict"]) == set(model.state_dict())
    fresh = DirectDigits.load_from_checkpoint("after.ckpt")
    torch.testing.assert_close(fresh.state_dict(), model.state_dict(), rtol=0, atol=0)
    # the int8 copy is a LightningModule of its own
    int8 = trainer.test(callback.quantized_model, loader, verbose=False)[0]["test_acc"]
    assert int8 == pytest.approx(_accuracy(callback.quantized_model, 1408, 1792), abs=1e-6)
    x = digits()[0][:50]
    with torch.no_grad():
        again = load_quantized("quantized", DirectDigits())
        torch.testing.assert_close(again(x), callback.quantized_model(x), rtol=0, atol=0)
    first = (_report(callback), callback.quantized_model, Path("quantized/model.pt").read_bytes())
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, digit_loader(0, 1024), digit_loader(1024, 1408))
    assert trainer.current_epoch == 3
    assert _report(callback) is not first[0]
    assert callback.quantized_model is not first[1]
    assert Path("quantized/model.pt").read_bytes() != first[2]
    names = ["manifest.json", "model.pt", "report.html", "report.json"]
    assert sorted(p.name for p in Path("quantized").iterdir()) == names


class _WorseInInt8(Digits):
    """Its metric notices an int8 network."""

    def _log(self, name: str, batch: tuple[Tensor, Tensor]) -> None:
        self(batch[0])
        self.log(f"{name}_acc", 0.4 if any(is_quantized(m) for m in self.modules()) else 0.9)


def test_a_worse_metric_is_not_kept_and_an_older_model_is_put_aside() -> None:
    _fit(Digits(ConvNet()), _callback("torch-ao-static", max_metric_drop=1.0), max_epochs=1)
    old = Path("quantized/model.pt").read_bytes()
    callback = _callback("torch-ao-static")
    told = r"kept no quantized model.*val_acc went from 0.9 to 0.4: a drop of 0.5, 0.49 over"
    with pytest.warns(UserWarning, match=told):
        _fit(_WorseInInt8(ConvNet()), callback, max_epochs=1)
    report = _report(callback)
    assert not report.kept
    assert callback.quantized_model is None
    assert (report.metric_before, report.metric_after) == (pytest.approx(0.9), pytest.approx(0.4))
    assert [(candidate.backend, candidate.outcome) for candidate in report.candidates] == [
        ("torch-ao-static", "metric")
    ]
    assert report.bytes_after is not None
    assert Path("quantized/model.previous.pt").read_bytes() == old
    assert not Path("quantized/model.pt").exists()
    assert not Path("quantized/manifest.json").exists()
    with pytest.raises(FileNotFoundError, match=r"report\.json says why"):
        load_quantized("quantized", Digits(ConvNet()))


def test_any_drop_at_all_can_be_refused() -> None:
    callback = _callback(max_metric_drop=-1.0)
    with pytest.warns(UserWarning, match="kept no quantized model"):
        _fit(Digits(mlp()), callback, max_epochs=1)
    assert callback.quantized_model is None


def test_without_validation_the_outputs_are_compared() -> None:
    model, callback = Digits(mlp()), _callback()
    quiet_trainer(callbacks=[callback], max_epochs=1).fit(model, digit_loader(0, 512))
    report = _report(callback)
    assert report.kept
    assert report.metric is None
    assert report.reason.startswith("No validation metric was logged. The outputs differ by 0.0")


def test_module_without_validation_step_is_calibrated_by_its_training_step() -> None:
    class OnlyTrains(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(64, 16), nn.Linear(16, 64)

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            assert not (batch_idx and self.training and torch.is_inference_mode_enabled())
            loss = nn.functional.mse_loss(self.decoder(torch.relu(self.encoder(batch["x"]))), batch["x"])
            self.log("train_loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    rows = [{"x": row} for row in digits()[0][:128].flatten(1)]
    model, callback = OnlyTrains(), _callback()
    quiet_trainer(callbacks=[callback], max_epochs=1).fit(model, torch.utils.data.DataLoader(rows, batch_size=16))
    assert _report(callback).kept
    assert _report(callback).layers_quantized == ("encoder", "decoder")
    x = digits()[0][:4].flatten(1)
    with torch.no_grad():
        expected = model.eval().decoder(torch.relu(model.encoder(x)))
        got = callback.quantized_model.decoder(torch.relu(callback.quantized_model.encoder(x)))
    assert float((got - expected).norm() / expected.norm()) < 0.05


def test_forward_that_asks_the_trainer_is_quantized_below_it() -> None:
    class Asks(Digits):
        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) * (1.0 if self.trainer.max_epochs else 2.0)

    callback = _callback("torch-ao-static", max_metric_drop=0.5)
    _fit(Asks(ConvNet()), callback, max_epochs=1)
    assert _report(callback).kept
    assert _report(callback).layers_quantized == ("net.conv1", "net.conv2", "net.head")


def test_torchmetrics_and_things_that_cannot_be_copied() -> None:
    class Rich(Digits):
        def __init__(self) -> None:
            super().__init__(mlp())
            self.accuracy = MulticlassAccuracy(10, average="micro")
            self.file = Path(__file__).open()  # noqa: SIM115
            self.last: Tensor | None = None

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            self.last = self(batch[0])  # a tensor with a history
            return nn.functional.cross_entropy(self.last, batch[1])

        def _log(self, name: str, batch: tuple[Tensor, Tensor]) -> None:
            self.accuracy(self(batch[0]), batch[1])
            self.log(f"{name}_acc", self.accuracy, on_step=False, on_epoch=True)

    model, callback = Rich(), _callback(max_metric_drop=0.5)
    _fit(model, callback)
    assert _report(callback).kept
    assert _report(callback).metric_before == pytest.approx(_accuracy(model.eval()), abs=1e-6)
    assert callback.quantized_model.file is model.file
    model.file.close()


def test_layers_built_in_setup_are_not_built_again() -> None:
    class BuildsInSetup(Digits):
        def __init__(self) -> None:
            super().__init__(nn.Identity())

        def setup(self, stage: str) -> None:
            self.net = mlp()

    model, callback = BuildsInSetup(), _callback(max_metric_drop=0.5)
    _fit(model, callback)
    assert _report(callback).kept
    assert _report(callback).metric_before == pytest.approx(_accuracy(model.eval()), abs=1e-6)
    assert _accuracy(callback.quantized_model) > 0.8


class _Data(LightningDataModule):
    """Moves digits to another range after the transfer: in training by the Trainer's state, and in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.prepared, self.stages = 0, []

    def prepare_data(self) -> None:
        self.prepared += 1

    def setup(self, stage: str) -> None:
        self.stages.append(stage)

    def train_dataloader(self) -> Any:
        return digit_loader(0, 512)

    def val_dataloader(self) -> Any:
        return digit_loader(1024, 1408)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert self.trainer is not None
        return [(batch[0] - 0.5) * (4 if self.trainer.training else 2), batch[1]]


def test_batch_hooks_of_a_datamodule_apply_once_and_in_the_right_stage() -> None:
    seen: list[tuple[bool, float, float]] = []

    class Sees(Digits):
        def forward(self, x: Tensor) -> Tensor:
            if not torch.is_grad_enabled():
                seen.append((self.training, float(x.min()), float(x.max())))
            return self.net(x)

    callback, data = _callback(max_metric_drop=1.0), _Data()
    quiet_trainer(callbacks=[callback], max_epochs=1).fit(Sees(mlp()), datamodule=data)
    assert _report(callback).metric == "val_acc"
    assert (data.prepared, data.stages) == (1, ["fit"])
    assert {low for _, low, _ in seen} == {-1.0, -2.0}, "through the hook once, by the state of the Trainer"
    assert not any(training for training, *_ in seen)
    validations = [low for _, low, _ in seen if low == -1.0]
    assert len(validations) == 3 * 6  # in the fit, for the float model and for the int8 copy


def test_calibration_batches_are_spread_over_the_epoch_and_copied() -> None:
    kept: list[Any] = []

    class Spy(QuantizeOnFitEnd):
        def _quantize(self, trainer: Any, pl_module: Any) -> None:
            kept.extend(self._kept.batches)

    class WritesIntoBatches(Digits):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            batch[0].data.zero_()
            return loss

    x, _ = digits()
    trainer = quiet_trainer(callbacks=[Spy(calibration_batches=4, backend="torch-ao-dynamic")], max_epochs=2)
    trainer.fit(WritesIntoBatches(mlp()), torch.utils.data.DataLoader(list(zip(*digits(), strict=True))[:200], 10))
    assert [int(next(i for i in range(200) if torch.equal(x[i], b[0][0]))) for b in kept] == [0, 50, 100, 150]


def test_no_loader_is_read_again_for_calibration() -> None:
    class Counts(torch.utils.data.IterableDataset[Any]):
        passes = 0

        def __iter__(self) -> Any:
            Counts.passes += 1
            return iter(list(zip(*digits(), strict=True))[:200])

    callback = _callback()
    loader = torch.utils.data.DataLoader(Counts(), batch_size=20)
    quiet_trainer(callbacks=[callback], max_epochs=1).fit(Digits(mlp()), loader)
    assert _report(callback).kept
    assert Counts.passes == 1


def test_weights_are_those_at_the_end_of_the_fit() -> None:
    # WeightAveraging puts the averaged weights into the module in on_train_end
    model, callback = Digits(mlp()), _callback(max_metric_drop=1.0)
    _fit(model, callback, callbacks=[WeightAveraging()])
    assert _report(callback).metric_before == pytest.approx(_accuracy(model.eval()), abs=1e-6)
    last = callback.quantized_model.net[3]
    scale = last.weight().q_scale()
    assert float((last.weight().dequantize() - model.net[3].weight.detach()).abs().max()) <= scale * 0.5001


@pytest.mark.parametrize(
    ("monitor", "mode", "expected"),
    [
        (None, "auto", ("val_acc", "max")),
        ("val_loss", "auto", ("val_loss", "min")),
        ("val_loss", "max", ("val_loss", "max")),
    ],
)
def test_metric_and_direction(monitor: str | None, mode: str, expected: tuple[str, str]) -> None:
    callback = _callback(monitor=monitor, mode=mode, max_metric_drop=10.0)
    _fit(Digits(mlp()), callback, max_epochs=1)
    assert (_report(callback).metric, _report(callback).metric_mode) == expected
    assert _report(callback).kept


def test_a_misspelt_monitor_ends_the_fit_at_its_first_validation() -> None:
    class Counts(Digits):
        epochs = 0

        def on_train_epoch_start(self) -> None:
            self.epochs += 1

    model = Counts(mlp())
    with pytest.raises(MisconfigurationException, match=r"'val_ac'.*no such metric.*'val_acc'.*Did you mean 'val_acc'"):
        _fit(model, _callback(monitor="val_ac"), max_epochs=3, num_sanity_val_steps=1)
    assert model.epochs == 1
    callback = _callback(monitor="val_loss", max_metric_drop=10.0)
    _fit(Digits(mlp()), callback, max_epochs=1, num_sanity_val_steps=1)
    assert _report(callback).kept


def test_a_metric_of_the_training_step_is_none_of_validation_and_nothing_is_kept() -> None:
    class LogsInTraining(Digits):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("train_loss", loss)
            return loss

    callback = _callback(monitor="train_loss")
    with pytest.warns(UserWarning, match=r"monitor='train_loss' was not logged .*'val_loss', 'val_acc'"):
        _fit(LogsInTraining(mlp()), callback, max_epochs=1)
    assert callback.quantized_model is None


def test_nothing_to_quantize_ends_the_fit_with_a_report() -> None:
    class Scalar(Digits):
        def __init__(self) -> None:
            super().__init__(nn.BatchNorm2d(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x).flatten(1)[:, :10]

    callback = _callback()
    with pytest.warns(UserWarning, match="The model stays in float. torch-ao-dynamic: No layer can be"):
        _fit(Scalar(), callback, max_epochs=1)
    assert not _report(callback).kept
    assert json.loads(Path("quantized/report.json").read_text())["kept"] is False
    assert not Path("quantized/model.pt").exists()


def test_nothing_is_written_when_the_fit_fails() -> None:
    class Fails(Digits):
        def on_train_epoch_end(self) -> None:
            raise ZeroDivisionError

    callback = _callback()
    with pytest.raises(ZeroDivisionError):
        _fit(Fails(mlp()), callback)
    assert callback.report is None
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("setting", ["fast_dev_run", "barebones"])
def test_trial_runs_are_left_alone(setting: str) -> None:
    import lightning.pytorch as pl

    callback = QuantizeOnFitEnd()
    trainer = pl.Trainer(accelerator="cpu", max_steps=2, callbacks=[callback], **{setting: True})  # type: ignore[arg-type]
    trainer.fit(Digits(mlp()), digit_loader(0, 128), digit_loader(0, 128))
    assert (callback.report, callback.quantized_model) == (None, None)
    assert not Path("quantized").exists()


def _fit_on_a_rank(folder: str) -> dict[str, Any]:
    class WithMetric(Digits):
        def __init__(self) -> None:
            super().__init__(ConvNet())
            self.accuracy = MulticlassAccuracy(10, average="micro")

        def _log(self, name: str, batch: tuple[Tensor, Tensor]) -> None:
            self.accuracy(self(batch[0]), batch[1])
            self.log(f"{name}_acc", self.accuracy, on_step=False, on_epoch=True)

    torch.manual_seed(0)
    written = []
    replace = Path.replace
    Path.replace = lambda self, target: (written.append(Path(target).name), replace(self, target))[1]  # type: ignore[method-assign]
    callback = _callback("torch-ao-static", folder=folder, max_metric_drop=1.0, monitor="val_acc")
    trainer = quiet_trainer(callbacks=[callback], strategy="ddp", devices=2, max_epochs=1)
    model = WithMetric()
    trainer.fit(model, digit_loader(0, 256), digit_loader(1024, 1152))
    trainer.test(model, digit_loader(1408, 1536), verbose=False)  # the ranks still meet
    return {
        "world": trainer.world_size,
        "first": trainer.is_global_zero,
        "report": callback.report,
        "has model": callback.quantized_model is not None,
        "written": written,
        "failure": _fail_on_first_rank(),
    }


def _fail_on_first_rank() -> str:
    def broken(*_: Any, **__: Any) -> Any:
        raise OSError("disk full")

    quantize.write_result = broken
    trainer = quiet_trainer(callbacks=[_callback()], strategy="ddp", devices=2, max_epochs=1)
    try:
        trainer.fit(Digits(mlp()), digit_loader(0, 128), digit_loader(1024, 1088))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_on_two_ranks_the_first_measures_and_writes_and_its_failure_reaches_the_other(tmp_path: Path) -> None:
    one, other = on_two_ranks(_fit_on_a_rank, str(tmp_path / "q"))
    assert (one["world"], one["first"], other["first"]) == (2, True, False)
    assert one["report"] == other["report"]
    assert one["report"].kept
    assert one["report"].metric == "val_acc"
    assert (one["has model"], other["has model"]) == (True, False)
    assert set(one["written"]) >= {"model.pt", "report.html", "report.json"}
    assert other["written"] == []
    assert {p.name for p in (tmp_path / "q").iterdir()} == {"manifest.json", "model.pt", "report.html", "report.json"}
    assert one["failure"] == "OSError: disk full"
    assert other["failure"] == "QuantizationError: Quantization failed on the first rank; its log says why."


def test_strategies_that_spread_the_model_are_refused() -> None:
    callback = QuantizeOnFitEnd()

    class Stub:
        strategy = FSDPStrategy()

    with pytest.raises(MisconfigurationException, match="FSDPStrategy spreads it over devices"):
        callback.setup(Stub(), Digits(mlp()), "fit")  # type: ignore[arg-type]
    callback.setup(Stub(), Digits(mlp()), "test")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"scheme": "int8-static"}, ValueError, "scheme must be one of .*'static-int8'"),
        ({"backend": "torch-ao-dynamik"}, ValueError, "backend must be one of .* Did you mean 'torch-ao-dynamic'"),
        (
            {"backend": "torch-ao-dynamic", "scheme": "fp8"},
            ValueError,
            "'torch-ao-dynamic' is for 'dynamic-int8', not for scheme='fp8'",
        ),
        ({"device": "gpu"}, ValueError, "device must be one of 'cpu', 'cuda', 'auto', got 'gpu'"),
        ({"objective": "speed"}, ValueError, "objective must be one of 'latency', 'size'"),
        ({"mode": "maximum"}, ValueError, "mode must be one of .* Did you mean 'max'"),
        ({"calibration": "test"}, ValueError, "calibration must be one of 'train', 'val'"),
        ({"weights": "bets"}, ValueError, "weights must be one of .* Did you mean 'best'"),
        ({"artefacts": ["onx"]}, ValueError, "artefacts must be one of .* Did you mean 'onnx'"),
        (
            {"artefacts": "onnx"},
            TypeError,
            r"artefacts must be a list of names, got the string 'onnx'; write \['onnx'\]",
        ),
        ({"calibration_batches": 0}, ValueError, "calibration_batches must be at least 1, got 0"),
        ({"calibration_batches": 2.0}, TypeError, "calibration_batches must be a whole number, got 2.0"),
        ({"validation_batches": True}, TypeError, "validation_batches must be a whole number, got True"),
        ({"max_metric_drop": "1%"}, TypeError, "max_metric_drop must be a number, got '1%'"),
        ({"max_metric_drop": float("nan")}, ValueError, "got NaN"),
        ({"skip": [1]}, TypeError, r"skip must be a list of names, got \[1\]"),
        ({"skip": "head"}, TypeError, r"skip must be a list of names, got the string 'head'; write \['head'\]"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        QuantizeOnFitEnd(**arguments)


def test_arguments_are_copied() -> None:
    skip, artefacts = ["head"], ["onnx"]
    callback = QuantizeOnFitEnd(skip=skip, artefacts=artefacts)
    skip.append("body")
    artefacts.append("pt2")
    assert (callback.skip, callback.artefacts) == (["head"], ["onnx"])


def test_a_step_that_fails_outside_the_fit_is_named_in_the_report() -> None:
    class NeedsTheFit(Digits):
        def on_validation_epoch_end(self) -> None:
            if not self.trainer.optimizers:
                raise LookupError("no optimizer here")

    callback = _callback()
    _fit(NeedsTheFit(mlp()), callback, max_epochs=1)
    report = _report(callback)
    assert report.kept
    assert report.metric is None
    assert report.reason.startswith("Validation failed (LookupError: no optimizer here). The outputs differ by 0.0")


def test_a_fit_without_training_batches_has_nothing_to_calibrate_with() -> None:
    callback = _callback(max_metric_drop=1.0)
    model = Digits(mlp())
    trainer = _fit(model, callback, max_epochs=1)
    assert _report(callback).kept
    files = {path.name: path.read_bytes() for path in Path("quantized").iterdir()}
    with pytest.warns(UserWarning, match="did nothing: no batch was trained .max_epochs=1 was reached before"):
        trainer.fit(model, digit_loader(0, 64), digit_loader(1024, 1088))  # all its epochs are done
    assert (callback.report, callback.quantized_model) == (None, None)
    assert {path.name: path.read_bytes() for path in Path("quantized").iterdir()} == files


@pytest.mark.parametrize(
    ("limits", "batches"),
    [
        ({}, 6),
        ({"validation_batches": 2}, 2),
        ({"validation_batches": None}, 6),
        ({"limit_val_batches": 3}, 3),
        ({"limit_val_batches": 3, "validation_batches": None}, 3),
        ({"limit_val_batches": 0}, None),
    ],
)
def test_validation_is_limited_by_the_callback_and_the_trainer(limits: dict[str, Any], batches: int | None) -> None:
    ours = {name: value for name, value in limits.items() if name == "validation_batches"}
    callback = _callback(max_metric_drop=1.0, **ours)
    _fit(Digits(mlp()), callback, max_epochs=1, **{name: v for name, v in limits.items() if name not in ours})
    assert _report(callback).validation_batches == batches
    assert (_report(callback).metric is None) == (batches is None)


def test_calibration_on_validation_batches_as_their_step_got_them() -> None:
    kept: list[Any] = []

    class Spy(QuantizeOnFitEnd):
        def _quantize(self, trainer: Any, pl_module: Any) -> None:
            kept.extend(self._kept.batches)

    class Doubles(Digits):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [batch[0] * 2, batch[1]]

    x, _ = digits()
    spy = Spy(calibration="val", calibration_batches=3, backend="torch-ao-dynamic")
    trainer = quiet_trainer(callbacks=[spy], max_epochs=2, num_sanity_val_steps=2)
    trainer.fit(Doubles(mlp()), digit_loader(0, 64), digit_loader(1024, 1408))
    assert len(kept) == 3
    for batch, start in zip(kept, (1024, 1152, 1280), strict=True):  # every second of six, none of the sanity check
        torch.testing.assert_close(batch[0], 2 * x[start : start + 64], rtol=0, atol=0)


@pytest.mark.parametrize("arguments", [{}, {"limit_val_batches": 0}], ids=["no loader", "none allowed"])
def test_calibration_on_validation_batches_that_there_are_not_is_refused_before_training(arguments: Any) -> None:
    trainer = quiet_trainer(callbacks=[_callback(calibration="val")], max_epochs=1, **arguments)
    loaders = [digit_loader(1024, 1088)] if arguments else []
    with pytest.raises(MisconfigurationException, match=r"calibration='val'.*needs validation batches"):
        trainer.fit(Digits(mlp()), digit_loader(0, 64), *loaders)
    assert trainer.global_step == 0


def test_the_weights_of_the_best_checkpoint() -> None:
    class GetsWorse(Digits):
        def on_train_end(self) -> None:
            self.net[3].weight.data.neg_()

    model, callback = GetsWorse(mlp()), _callback(weights="best", max_metric_drop=1.0)
    checkpoint = ModelCheckpoint(monitor="val_acc", mode="max")
    trainer = _fit(model, callback, callbacks=[checkpoint], enable_checkpointing=True)
    report = _report(callback)
    assert report.weights == "best"
    assert _accuracy(model.eval()) < 0.3
    model.load_state_dict(torch.load(checkpoint.best_model_path, weights_only=True)["state_dict"])
    assert report.metric_before == pytest.approx(_accuracy(model.eval()), abs=1e-6)
    assert report.metric_before > 0.5
    assert _accuracy(callback.quantized_model) > 0.5
    assert trainer.current_epoch == 2


def test_best_weights_that_there_are_not() -> None:
    with pytest.raises(MisconfigurationException, match=r"weights='best'.*Add a ModelCheckpoint"):
        _fit(Digits(mlp()), _callback(weights="best"))
    callback, checkpoint = _callback(weights="best"), ModelCheckpoint(save_top_k=0)
    with pytest.warns(UserWarning, match="this fit has written no best checkpoint"):
        _fit(Digits(mlp()), callback, callbacks=[checkpoint], enable_checkpointing=True, max_epochs=1)
    assert not _report(callback).kept


def test_an_engine_that_cannot_work_here_is_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "onnxruntime is not installed: pip install 'lightning-speedkit[quant]'"
    monkeypatch.setattr("lightning_speedkit.compress.engine.Engine.missing", lambda self, device: line)
    told = r"no engine can work here for 'cpu': torch-ao-dynamic: onnx.*quant"
    with pytest.raises(MisconfigurationException, match=told):
        _fit(Digits(mlp()), _callback())
    quiet_trainer(callbacks=[_callback()], fast_dev_run=True).fit(Digits(mlp()), digit_loader(0, 64))


def test_numbers_reach_the_loggers_of_the_trainer() -> None:
    callback = _callback(max_metric_drop=1.0)
    _fit(Digits(mlp()), callback, max_epochs=1, logger=CSVLogger("logs", version="one"))
    with Path("logs/lightning_logs/one/metrics.csv").open() as file:
        (logged,) = [line for line in csv.DictReader(file) if line["quantize/kept"]]
    report = _report(callback)
    assert logged["step"] == "16"
    assert float(logged["quantize/bytes_after"]) == report.bytes_after
    assert float(logged["quantize/val_acc_before"]) == pytest.approx(report.metric_before)
    assert float(logged["quantize/seconds_batch_after"]) == pytest.approx(report.seconds_after_batch)


def test_pruned_weights_stay_zero_where_pruning_and_quantization_share_a_fit() -> None:
    class PrunesInTheEnd(Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            with torch.no_grad():
                pl_module.net[1].weight[:, ::2] = 0.0

    model, callback = Digits(mlp()), _callback(max_metric_drop=1.0)
    _fit(model, callback, callbacks=[PrunesInTheEnd()], max_epochs=1)
    int8 = callback.quantized_model.net[1].weight().dequantize()
    assert int(int8[:, ::2].count_nonzero()) == 0
    assert int(int8[:, 1::2].count_nonzero()) > 1500
    assert _report(callback).metric_before == pytest.approx(_accuracy(model.eval()), abs=1e-6)


def _loads_alone(folder: str) -> tuple[float, bool]:
    real, only = torch.load, []

    def load(*args: Any, **arguments: Any) -> Any:
        only.append(arguments.get("weights_only"))
        return real(*args, **arguments)

    torch.load = load  # type: ignore[assignment]
    model = load_quantized(folder, Digits(ConvNet()))
    return _accuracy(model), bool(only) and all(only)


def test_the_artefact_is_read_in_another_process_without_a_pickle() -> None:
    callback = _callback("torch-ao-static", max_metric_drop=1.0)
    _fit(Digits(ConvNet()), callback, max_epochs=1)
    with start_forked(_loads_alone, str(Path("quantized").absolute()), log=Path("log.txt").absolute()) as process:
        assert process.wait(60.0) == 0, Path("log.txt").read_text()
        accuracy, without_pickles = process.result()
    assert accuracy == pytest.approx(_report(callback).metric_after, abs=1e-6)
    assert without_pickles


def test_the_engine_that_is_fastest_here_is_kept_or_none() -> None:
    torch.manual_seed(0)
    model, callback = Digits(mlp()), QuantizeOnFitEnd(max_metric_drop=0.05)
    trainer = quiet_trainer(callbacks=[callback], max_epochs=1)
    trainer.fit(model, digit_loader(0, 512), digit_loader(1024, 1152))
    report = _report(callback)
    tried = {candidate.backend: candidate for candidate in report.candidates}
    assert set(tried) >= {"onnxruntime-static", "onnxruntime-dynamic", "torch-ao-dynamic", "onnxruntime-float32"}
    assert [name for name, candidate in tried.items() if candidate.outcome in ("failed", "missing")] == []
    if not report.kept:
        assert {candidate.outcome for candidate in report.candidates} <= {"slower", "metric"}
    else:
        kept = tried[str(report.backend)]
        assert kept.seconds_batch < report.seconds_before_batch
        assert kept.seconds_batch <= tried["onnxruntime-float32"].seconds_batch
        x = digits()[0][:7]
        with torch.no_grad():
            again = load_quantized("quantized", Digits(mlp()))(x)
            torch.testing.assert_close(again, callback.quantized_model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"skip": ["net.l"]}, ValueError, "skip='net.l' matches no module"),
        ({"artefacts": ["pt2"]}, MisconfigurationException, "torch-ao-dynamic: it writes state_dict, not pt2"),
        ({"folder": "s3://bucket"}, MisconfigurationException, "writes to the local disk"),
    ],
)
def test_what_would_only_be_seen_at_the_end_is_said_before_training(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    class Trains(Digits):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise AssertionError

    with pytest.raises(error, match=message):
        _fit(Trains(mlp()), _callback(**arguments), limit_train_batches=1, limit_val_batches=1)


def test_on_a_full_disk_model_and_report_are_still_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(quantize, "write_result", full)
    callback = _callback(max_metric_drop=1.0)
    with pytest.raises(OSError, match="No space left"):
        _fit(Digits(mlp()), callback, limit_train_batches=2, limit_val_batches=1, max_epochs=1)
    assert callback.quantized_model is not None
    assert _report(callback).kept


def test_double_precision_is_judged_by_its_metric() -> None:
    x, y = digits()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x[:128].double(), y[:128]), 64)
    callback = _callback(max_metric_drop=1.0)
    quiet_trainer(callbacks=[callback], max_epochs=1, precision="64-true").fit(Digits(mlp()), loader, loader)
    assert _report(callback).metric is not None


def test_a_diverged_model_is_said_to_be_one() -> None:
    class Diverges(Digits):
        def on_train_end(self) -> None:
            for parameter in self.parameters():
                parameter.data.fill_(float("nan"))

    callback = _callback()
    with pytest.warns(UserWarning, match="answers the batches with NaN"):
        _fit(Diverges(mlp()), callback, limit_train_batches=2, limit_val_batches=1, max_epochs=1)
    assert not _report(callback).kept

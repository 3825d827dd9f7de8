"""A module's own validation step is run again, alone and quietly: for the calls of its network, and for its metrics."""

from __future__ import annotations

import gc
import logging
import warnings
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from lightning_speedkit.compress.float_copy import copy_module
from lightning_speedkit.compress.validation import network_calls, validation_metrics
from lightning_speedkit.errors import QuantizationError


def _batch(value: float, count: int = 4) -> list[Tensor]:
    return [torch.full((count, 3), value), torch.full((count,), value)]


def _loader(*batches: Any) -> DataLoader[Any]:
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


class _Regression(LightningModule):
    """Logs the mean of the labels, so that the metric of any batches is worked out by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)
        self.happened: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        self.happened.append(f"{'train' if self.training else 'eval'} {torch.is_grad_enabled()}")
        return self.net(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.happened.append("training_step")
        return self(batch[0]).mean()

    def configure_optimizers(self) -> Any:
        raise AssertionError("there is no training here")


class _Validated(_Regression):
    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self(batch[0])
        self.log("label", batch[1].mean(), batch_size=len(batch[1]))
        self.log("vector", batch[1].mean(), on_step=True, on_epoch=False)


def test_calls_are_those_of_the_validation_step_in_eval_mode() -> None:
    module = _Validated().eval()
    module.happened = shared = _Log()
    calls = network_calls(module, [_batch(1.0), _batch(2.0)])
    assert [(call.name, float(call.args[0].mean())) for call in calls] == [("", 1.0), ("", 2.0)]
    assert set(shared.lines) == {"eval False"}


class _Log:
    """A list that copies of a module share."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def append(self, line: str) -> None:
        self.lines.append(line)

    def __deepcopy__(self, memo: Any) -> _Log:
        return self


def test_without_a_validation_step_it_is_the_training_step() -> None:
    module = _Regression()
    module.happened = shared = _Log()
    calls = network_calls(module, [_batch(1.0)])
    assert [call.name for call in calls] == [""]
    assert shared.lines[:2] == ["training_step", "eval False"]


def test_a_validation_step_that_does_not_take_training_batches_is_passed_over() -> None:
    class Other(_Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self(batch["image"])

    calls = network_calls(Other(), [_batch(1.0)])
    assert [tuple(call.args[0].shape) for call in calls] == [(4, 3)]


@pytest.mark.parametrize(
    "batch",
    [torch.ones(4, 3), [torch.ones(4, 3), torch.ones(4)], {"note": "text", "x": torch.ones(4, 3)}],
    ids=["tensor", "list", "dict"],
)
def test_without_any_step_the_forward_gets_what_looks_like_the_input(batch: Any) -> None:
    class Manual(_Regression):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    (call,) = network_calls(Manual(), [batch])
    assert torch.equal(call.args[0], torch.ones(4, 3))


def test_a_forward_that_cannot_be_called_alone_is_recorded_below_itself() -> None:
    class Asks(_Validated):
        def forward(self, x: Tensor) -> Tensor:
            assert self.trainer.validating
            return self.net(x)

    assert [call.name for call in network_calls(Asks(), [_batch(1.0)])] == ["net"]


def test_where_nothing_runs_every_reason_is_told() -> None:
    class Nothing(_Regression):
        def forward(self, x: Tensor) -> Tensor:
            raise ZeroDivisionError("never")

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("none", 1.0)

    with pytest.raises(QuantizationError) as told:
        network_calls(Nothing(), [_batch(1.0)])
    message = str(told.value)
    assert message.startswith("No step of Nothing could be run on training batches")
    assert "validation_step: it calls no module with parameters that can be called alone" in message
    assert "training_step: ZeroDivisionError: never" in message
    assert "forward: ZeroDivisionError: never" in message


def test_metrics_are_weighted_by_the_size_of_the_batches() -> None:
    metrics, count = validation_metrics(_Validated(), _loader(_batch(1.0, 3), _batch(5.0, 1)))
    assert metrics["label"] == pytest.approx((3 * 1.0 + 1 * 5.0) / 4)
    assert count == 2
    metrics, count = validation_metrics(_Validated(), _loader(_batch(1.0), _batch(5.0)), limit_batches=1)
    assert (metrics["label"], count) == (1.0, 1)
    metrics, count = validation_metrics(_Validated(), [_loader(_batch(1.0)), _loader(_batch(5.0), _batch(7.0))])
    assert (metrics["label/dataloader_idx_0"], metrics["label/dataloader_idx_1"], count) == (1.0, 6.0, 2)


class _Data(LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.log = _Log()

    def prepare_data(self) -> None:
        self.log.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.log.append("setup")

    def teardown(self, stage: str) -> None:
        self.log.append("teardown")

    def val_dataloader(self) -> Any:
        raise AssertionError("the loaders are there already")

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0], batch[1] * 10]


def test_a_datamodule_gives_its_batch_hooks_and_nothing_else() -> None:
    data = _Data()
    metrics, _ = validation_metrics(_Validated(), _loader(_batch(1.0)), datamodule=data)
    assert metrics["label"] == 10.0
    assert data.log.lines == []
    assert data.trainer is None
    assert "val_dataloader" not in vars(data)


def test_the_module_is_not_set_up_again() -> None:
    class Sets(_Validated):
        def prepare_data(self) -> None:
            raise AssertionError

        def setup(self, stage: str) -> None:
            raise AssertionError

        def configure_model(self) -> None:
            raise AssertionError

        def configure_callbacks(self) -> Any:
            raise AssertionError

        def teardown(self, stage: str) -> None:
            raise AssertionError

    assert validation_metrics(Sets(), _loader(_batch(2.0)))[0]["label"] == 2.0


class _WithMetric(_Validated):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(2, average="micro")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.accuracy((batch[0].mean(1) > 0).long(), (batch[1] > 0).long())
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)


def test_a_metric_of_a_copy_is_logged_by_its_own_name() -> None:
    module = _WithMetric()
    batches = _loader([torch.ones(4, 3), torch.tensor([1.0, 1.0, 1.0, -1.0])], [torch.ones(4, 3), -torch.ones(4)])
    assert validation_metrics(module, batches)[0]["accuracy"] == 3 / 8
    # what log() finds out in a fit, and a copy made before its end inherits: the metrics by their ids
    module._metric_attributes = {id(module.accuracy): "accuracy"}
    assert validation_metrics(copy_module(module), batches)[0]["accuracy"] == 3 / 8


def test_it_is_quiet_and_leaves_logging_and_warnings_as_found(caplog: pytest.LogCaptureFixture) -> None:
    loggers = [logging.getLogger(name) for name in ("lightning", "lightning.pytorch", "lightning.fabric")]

    def state() -> Any:
        return [(logger.level, list(logger.filters)) for logger in loggers], list(warnings.filters)

    class Fails(_Validated):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            warnings.warn("look at me", stacklevel=1)
            raise ZeroDivisionError

    before = state()
    with caplog.at_level(logging.INFO):
        inside = state()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            validation_metrics(_Validated(), _loader(_batch(1.0)))
            with pytest.raises(ZeroDivisionError):
                validation_metrics(Fails(), _loader(_batch(1.0)))
        assert state() == inside
    assert state() == before
    assert [record.getMessage() for record in caplog.records if record.levelno <= logging.INFO] == []
    assert torch.is_grad_enabled()
    assert list(Path().iterdir()) == []


class _Closing(_Data):
    """Closes what it holds when a run has failed, or when it goes itself."""

    closed: ClassVar[list[str]] = []

    def on_exception(self, exception: BaseException) -> None:
        self.closed.append("on_exception")

    def __del__(self) -> None:
        self.closed.append("collected")

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError


def test_a_datamodule_is_not_closed_by_a_validation_that_ends_or_fails() -> None:
    class Fails(_Validated):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise ZeroDivisionError

    class Sees(_Validated):
        def on_validation_epoch_end(self) -> None:
            assert isinstance(self.trainer.datamodule, _Closing)  # type: ignore[attr-defined]

    data = _Closing()
    validation_metrics(Sees(), _loader(_batch(1.0)), datamodule=data)
    with pytest.raises(ZeroDivisionError):
        validation_metrics(Fails(), _loader(_batch(1.0)), datamodule=data)
    gc.collect()
    assert data.closed == []
    assert data.trainer is None


def test_what_a_step_gives_to_its_tracker_goes_nowhere() -> None:
    folders = []

    class Tracks(_Validated):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            logger: Any = self.logger
            logger.log_image("image", [batch[0]])
            logger.experiment["val/image"].append(1).wait()
            logger.experiment.config.update({"a": 1}, allow_val_change=True)
            with logger.experiment.run() as run:
                run.tags["x"] = list(run.history())
            folders.append(Path(str(self.trainer.log_dir)))
            (folders[-1] / "figure.txt").write_text("written by the step")

    metrics, _ = validation_metrics(Tracks(), _loader(_batch(3.0)))
    assert metrics["label"] == 3.0
    assert not folders[0].exists()
    assert list(Path().iterdir()) == []


def test_batches_in_float64_fit_a_copy_in_float32_if_that_is_asked() -> None:
    class Measures(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 1)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            assert batch[1].dtype == torch.int64
            self.log("mean", self.net(batch[0]).mean())

    batches = _loader([torch.ones(3, 2, dtype=torch.float64), torch.ones(3, dtype=torch.int64)])
    module = Measures()
    metrics, _ = validation_metrics(copy_module(module), batches, in_float32=True)
    assert metrics["mean"] == pytest.approx(float(module.net(torch.ones(3, 2)).mean()))
    with pytest.raises(RuntimeError, match="dtype"):
        validation_metrics(copy_module(module), batches)


def test_a_training_step_without_an_index_is_run() -> None:
    class NoIndex(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Bilinear(2, 2, 1)

        def training_step(self, batch: Any) -> Tensor:
            return self.net(*batch).mean()

    (call,) = network_calls(NoIndex(), [[torch.ones(3, 2), torch.ones(3, 2)]])
    assert (call.name, len(call.args)) == ("net", 2)

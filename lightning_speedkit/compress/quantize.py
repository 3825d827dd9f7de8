"""Makes a quantized copy of a trained model, measures it against the float one, and keeps it only if it is better.

What it does: ``quantize_model`` takes a model and a few batches; ``QuantizeOnFitEnd`` does the same at the end of
``trainer.fit`` with batches of the fit itself, tries every engine that can work here, and keeps the one that is
fastest, or smallest, inside a tolerance of the validation metric. Both leave the float model untouched, so testing,
resuming and loading the best checkpoint afterwards work as without them.

When it helps: inference on a CPU, and size anywhere: int8 weights are a quarter of float32. What it costs: a few
batches kept in memory until the end of the fit, then a conversion per engine, and some validation batches, once in
float and once for each copy that is judged. int8 is not always faster: small convolutions at batch size 1 can be
slower. That is why it measures before it keeps.

Source: the quantization callback that Lightning had until 2.0 broke ``trainer.test(ckpt_path=...)`` because it changed
the model in place (Lightning #12896, removed in #16750); the copy avoids that. A limit on the loss of accuracy, with
layers put back to float until it is met, is what NNCF calls accuracy-aware quantization.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn
from typing_extensions import override

from lightning_speedkit.compress.artefact import load_quantized, save_quantized
from lightning_speedkit.compress.choice import check_choice
from lightning_speedkit.compress.conversion import QuantizationDetails, quantize_model
from lightning_speedkit.compress.engine import FORMATS, SCHEMES, engine_named
from lightning_speedkit.compress.judge import Judge
from lightning_speedkit.compress.kept_batches import KeptBatches, planned_batches
from lightning_speedkit.compress.module_names import check_names
from lightning_speedkit.compress.quantize_arguments import check_skip
from lightning_speedkit.compress.quantize_fit import (
    is_trial_run,
    monitored,
    validation_data,
    why_untrained,
    with_best_weights,
)
from lightning_speedkit.compress.rank_wait import RankWait
from lightning_speedkit.compress.report import QuantizationReport
from lightning_speedkit.compress.result_files import refuse_folder, write_result
from lightning_speedkit.compress.trial import Plan, planned_engines, try_quantized, why_not
from lightning_speedkit.errors import QuantizationError, did_you_mean
from lightning_speedkit.measure.own_random_numbers import own_random_numbers

__all__ = [
    "QuantizationDetails",
    "QuantizationReport",
    "QuantizeOnFitEnd",
    "load_quantized",
    "quantize_model",
    "save_quantized",
]


class QuantizeOnFitEnd(Callback):
    """Makes quantized copies of the model when ``fit`` ends and keeps the best one, if it is a gain.

    The float model is never changed. Afterwards ``quantized_model`` is the copy, in eval mode, called like the float
    module (``None`` if none was kept, and on other ranks than the first), and ``report`` is the
    :class:`QuantizationReport`. Both are also written to ``folder``: the model in the formats of ``artefacts``, for
    :func:`load_quantized`, ``report.json`` and ``report.html``. If nothing is kept, an older model there is renamed to
    ``<name>.previous<suffix>``. The numbers of the report go to the loggers of the Trainer, under ``quantize/``.

    It calibrates on batches spread over the first epoch of the fit, as the step got them, so no loader is read a
    second time for it. The metric is that of the module's own ``validation_step``, measured for the float model and
    the copies alike. Without a validation loader or a logged metric the outputs on the calibration batches are
    compared, and a relative difference up to 0.1 is kept. Every copy is checked: full batches and one sample, twice.

    Nothing is done in ``fast_dev_run`` and ``barebones``, and nothing is written when the fit fails. A strategy that
    spreads parameters over devices (FSDP, DeepSpeed, ModelParallelStrategy) is refused.

    Args:
        scheme: ``"auto"``, ``"dynamic-int8"``, ``"static-int8"``, ``"weight-only-int8"``, ``"weight-only-int4"`` or
            ``"fp8"``.
        backend: The name of one engine, such as ``"onnxruntime-static"`` or ``"torch-ao-dynamic"``, or of its scheme's;
            ``None`` for every engine of the scheme that can work here.
        device: Where the model will run: ``"cpu"``, ``"cuda"``, or ``"auto"`` for CUDA where there is one.
        objective: ``"latency"`` keeps the fastest, and none that is not faster than float32, also in the same runtime:
            where that is fastest, float32 in that runtime is kept. ``"size"`` keeps the smallest.
        max_metric_drop: The largest loss of quality that is kept. For a metric to maximize: its difference, or its
            share where the metric is above 1 (0.01 is one point of accuracy, on either scale). For one to minimize:
            its relative increase.
        monitor: The validation metric that decides. By default one that ModelCheckpoint or EarlyStopping maximizes,
            else an accuracy-like one, else one that they minimize, else a loss.
        mode: ``"max"`` if a higher metric is better, ``"min"`` if a lower one is, ``"auto"`` to take it from the
            callback that watches the metric, or from its name.
        calibration: Whose batches to calibrate on, ``"train"`` or ``"val"``.
        calibration_batches: How many of them are kept.
        validation_batches: The most validation batches per loader to measure the metric on; ``None`` for all.
        weights: ``"last"`` for the weights at the end of the fit, ``"best"`` for those of the best checkpoint.
        skip: Names of submodules that stay in float; ``*`` and ``?`` are wildcards. One that matches none is an error.
        accuracy_aware: Whether layers go back to float, those that hurt most first, until the metric is inside the
            tolerance.
        artefacts: The formats to write, of ``"state_dict"``, ``"pt2"`` and ``"onnx"``, as the engine can; engines that
            can write none of them are left out. ``None`` for the one that the engine prefers.
        folder: Where to write; ``None`` is ``quantized`` in the Trainer's ``default_root_dir``.

    >>> callback = QuantizeOnFitEnd(max_metric_drop=0.005)
    >>> callback.quantized_model is None, callback.report is None
    (True, True)
    """

    def __init__(
        self,
        scheme: str = "auto",
        backend: str | None = None,
        device: str = "cpu",
        objective: str = "latency",
        max_metric_drop: float = 0.01,
        monitor: str | None = None,
        mode: str = "auto",
        calibration: str = "train",
        calibration_batches: int = 8,
        validation_batches: int | None = 100,
        weights: str = "last",
        skip: list[str] | None = None,
        accuracy_aware: bool = True,
        artefacts: list[str] | None = None,
        folder: str | None = None,
    ) -> None:
        choices = {
            "scheme": (scheme, SCHEMES),
            "device": (device, ("cpu", "cuda", "auto")),
            "objective": (objective, ("latency", "size")),
            "mode": (mode, ("auto", "min", "max")),
            "calibration": (calibration, ("train", "val")),
            "weights": (weights, ("last", "best")),
        }
        for name, (value, allowed) in choices.items():
            check_choice(name, value, allowed)
        if backend is not None and scheme not in ("auto", engine_named(backend).scheme):
            raise ValueError(f"backend={backend!r} is for {engine_named(backend).scheme!r}, not for scheme={scheme!r}.")
        _check_count("calibration_batches", calibration_batches)
        if validation_batches is not None:
            _check_count("validation_batches", validation_batches)
        if isinstance(max_metric_drop, bool) or not isinstance(max_metric_drop, (int, float)):
            raise TypeError(f"max_metric_drop must be a number, got {max_metric_drop!r}.")
        if max_metric_drop != max_metric_drop:
            raise ValueError("max_metric_drop must be a number, got NaN.")
        wanted_formats = check_names("artefacts", artefacts)
        for name in wanted_formats:
            check_choice("artefacts", name, FORMATS)
        self.scheme = scheme
        self.backend = backend
        self.device = device
        self.objective = objective
        self.max_metric_drop = float(max_metric_drop)
        self.monitor = monitor
        self.mode = mode
        self.calibration = calibration
        self.calibration_batches = calibration_batches
        self.validation_batches = validation_batches
        self.weights = weights
        self.skip = check_names("skip", skip)
        self.accuracy_aware = accuracy_aware
        self.artefacts = wanted_formats or None
        self.folder = folder
        self.quantized_model: nn.Module | None = None
        self.report: QuantizationReport | None = None
        self._kept = KeptBatches(calibration_batches)
        self._wait: RankWait | None = None
        self._monitor_checked = False

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        spread = (FSDPStrategy, DeepSpeedStrategy, ModelParallelStrategy)
        if isinstance(trainer.strategy, spread):
            raise MisconfigurationException(
                f"QuantizeOnFitEnd needs the whole model in one process, and {type(trainer.strategy).__name__} "
                f"spreads it over devices. Use strategy='ddp', or quantize_model() on the model from a checkpoint."
            )
        if is_trial_run(trainer):
            return
        self._refuse_missing_engines()
        refuse_folder(self._folder(trainer))
        if self.weights == "best" and trainer.checkpoint_callback is None:
            raise MisconfigurationException(
                "QuantizeOnFitEnd(weights='best') needs the best checkpoint, and this Trainer writes none. Add a "
                "ModelCheckpoint with a monitor, or use weights='last'."
            )

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.quantized_model, self.report, self._monitor_checked = None, None, False
        self._let_go()
        if not is_trial_run(trainer):
            check_skip(pl_module, self.skip)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        planned = planned_batches(trainer, self.calibration)
        if self.calibration == "val" and not planned and not is_trial_run(trainer):
            raise MisconfigurationException(
                "QuantizeOnFitEnd(calibration='val') needs validation batches, and this fit has none. Give fit() a "
                "validation loader, check limit_val_batches, or use calibration='train'."
            )
        self._kept.begin(planned)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.calibration == "train" and trainer.is_global_zero and not is_trial_run(trainer):
            self._kept.offer(batch)

    @override
    def on_validation_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        wanted = self.calibration == "val" and trainer.state.fn == "fit" and not trainer.sanity_checking
        if wanted and trainer.is_global_zero and not is_trial_run(trainer):
            self._kept.offer(batch)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.monitor is None or self._monitor_checked or trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        self._monitor_checked = True
        logged = sorted(trainer.callback_metrics)  # of the first rank, which some metrics are logged on alone
        names = trainer.strategy.broadcast(logged)
        if self.monitor not in names and not is_trial_run(trainer):
            raise MisconfigurationException(
                f"QuantizeOnFitEnd(monitor={self.monitor!r}): no such metric was logged in the first validation; "
                f"logged: {names}.{did_you_mean(self.monitor, names)}"
            )

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not is_trial_run(trainer):
            self._wait = RankWait(trainer)  # here, where all ranks are; the strategy is torn down before on_fit_end

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if is_trial_run(trainer):
            rank_zero_info("QuantizeOnFitEnd does nothing in fast_dev_run and barebones.")
            return
        if self._wait is None:
            rank_zero_warn(f"QuantizeOnFitEnd did nothing: no batch was trained ({why_untrained(trainer)}).")
            return
        if trainer.is_global_zero and not self._kept.batches:
            rank_zero_warn("QuantizeOnFitEnd saw no batch in this fit, so there is nothing to calibrate with.")
        failure: BaseException | None = None
        if trainer.is_global_zero and self._kept.batches:
            try:
                self._quantize(trainer, pl_module)
            except BaseException as error:
                failure = error
        # the other ranks wait here, and learn what came of it
        self.report, failed = self._wait.from_first((self.report, failure is not None))
        self._let_go()
        if failure is not None:
            raise failure
        if failed:
            raise QuantizationError("Quantization failed on the first rank; its log says why.")

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._let_go()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._let_go()

    def _let_go(self) -> None:
        self._kept.clear()
        if self._wait is not None:
            self._wait.close()
        self._wait = None

    def _plan(self) -> Plan:
        device = self.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        return Plan(
            scheme=self.scheme,
            backend=self.backend,
            device=device,
            objective=self.objective,
            skip=self.skip,
            accuracy_aware=self.accuracy_aware,
            formats=self.artefacts,
        )

    def _refuse_missing_engines(self) -> None:
        """Said before the training, and not after it."""
        plan = self._plan()
        why = {engine.name: why_not(engine, plan) for engine in planned_engines(plan)}
        if all(why.values()):
            told = "; ".join(f"{name}: {reason}" for name, reason in why.items())
            raise MisconfigurationException(f"QuantizeOnFitEnd: no engine can work here for {plan.device!r}: {told}.")

    def _folder(self, trainer: pl.Trainer) -> str:
        return self.folder if self.folder is not None else f"{trainer.default_root_dir.rstrip('/')}/quantized"

    def _quantize(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        judge = Judge(
            monitor=self.monitor,
            mode=self.mode,
            max_metric_drop=self.max_metric_drop,
            monitored=monitored(trainer),
        )
        data = validation_data(trainer, self.validation_batches)
        try:
            module = pl_module if self.weights == "last" else with_best_weights(trainer, pl_module)
        except QuantizationError as missing:
            converted, report = None, QuantizationReport(kept=False, reason=str(missing))
        else:
            with own_random_numbers(self._plan().device):
                converted, report = try_quantized(module, self._kept.batches, data, judge, self._plan())
        # both are there, too, if the disk is full
        self.quantized_model, self.report = None if converted is None else converted.module, report
        folder = Path(self._folder(trainer))
        self.report = write_result(folder, converted, replace(report, weights=self.weights), self.artefacts)
        for logger in trainer.loggers:
            logger.log_metrics(self.report.metrics(), step=trainer.global_step)
        if self.report.kept:
            rank_zero_info(" ".join((self.report.describe(), *self.report.notes)))
        else:
            rank_zero_warn(
                f"QuantizeOnFitEnd kept no quantized model; {folder / 'report.json'} has all. {report.reason}"
            )


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, got {value!r}.")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}.")

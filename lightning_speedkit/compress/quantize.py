"""Makes an int8 copy of a trained model, measures it against the float one, and keeps it only if it is good enough.

What it does: ``quantize_model`` takes a model and a few batches; ``QuantizeOnFitEnd`` does the same at the end of
``trainer.fit`` with batches of the training itself. Both leave the float model untouched, so testing, resuming and
loading the best checkpoint afterwards work as without them.

When it helps: inference on a CPU, and size anywhere: int8 weights are a quarter of float32. Convolutional networks
are quantized statically and the others dynamically. What it costs: a few training batches kept in memory until the
end of the fit, and then some validation batches on the CPU, once in float and once in int8. It is not always faster:
small convolutions at batch size 1 are often slower in int8. That is why the report measures it.

Source: the quantization callback that Lightning had until 2.0 broke ``trainer.test(ckpt_path=...)`` because it changed
the model in place (Lightning #12896, removed in #16750); the copy avoids that. A limit on the loss of accuracy is
what NNCF calls accuracy-aware quantization.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from typing_extensions import override

from lightning_speedkit.compress.artefact import MODEL_FILE, REPORT_FILE, load_quantized, publish, save_quantized
from lightning_speedkit.compress.conversion import (
    BACKENDS,
    QuantizationDetails,
    check_choice,
    on_cpu,
    quantize_model,
)
from lightning_speedkit.compress.report import QuantizationReport
from lightning_speedkit.compress.trial import Judge, ValidationData, try_int8
from lightning_speedkit.errors import QuantizationError

__all__ = [
    "QuantizationDetails",
    "QuantizationReport",
    "QuantizeOnFitEnd",
    "load_quantized",
    "quantize_model",
    "save_quantized",
]


class QuantizeOnFitEnd(Callback):
    """Makes an int8 copy of the model when ``fit`` ends and keeps it if the validation metric allows.

    The float model is never changed. Afterwards ``quantized_model`` is the int8 copy, in eval mode on the CPU, called
    like the float module (``None`` if it was not kept, and on other ranks than the first), and ``report`` is the
    :class:`QuantizationReport`. Both are also written to ``folder``: ``model.pt`` for :func:`load_quantized`, and
    ``report.json``. If a result is not kept, an older ``model.pt`` there is renamed to ``model.previous.pt``.

    It calibrates on batches spread over the first epoch of the fit, as the training step got them, so no loader is
    read a second time for it. The metric is that of the module's own ``validation_step``, measured on the CPU for the
    float model and the int8 copy alike. Without a validation loader or a logged metric the outputs on the calibration
    batches are compared, and a relative difference up to 0.1 is kept.

    Nothing is done in ``fast_dev_run`` and ``barebones``, and nothing is written when the fit fails. A strategy that
    spreads parameters over devices (FSDP, DeepSpeed, ModelParallelStrategy) is refused.

    Args:
        backend: ``"auto"``, ``"fx_static"`` or ``"dynamic"``, as for :func:`quantize_model`. ``"auto"`` also goes on to
            ``"dynamic"`` if the static result loses too much.
        calibration_batches: How many training batches are kept and calibrated on.
        monitor: The validation metric that decides. By default one that ModelCheckpoint or EarlyStopping maximizes,
            else an accuracy-like one, else one that they minimize, else a loss.
        mode: ``"max"`` if a higher metric is better, ``"min"`` if a lower one is, ``"auto"`` to take it from the
            callback that watches the metric, or from its name.
        max_metric_drop: The largest loss of quality that is kept. For a metric to maximize: its difference, or its
            share where the metric is above 1 (0.01 is one point of accuracy, on either scale). For one to minimize:
            its relative increase.
        validation_batches: The most validation batches per loader to measure the metric on; ``None`` for all.
        skip: Names of submodules that stay in float; ``*`` and ``?`` are wildcards.
        folder: Where to write; ``None`` is ``quantized`` in the Trainer's ``default_root_dir``.

    >>> callback = QuantizeOnFitEnd(max_metric_drop=0.005)
    >>> callback.quantized_model is None, callback.report is None
    (True, True)
    """

    def __init__(
        self,
        backend: str = "auto",
        calibration_batches: int = 8,
        monitor: str | None = None,
        mode: str = "auto",
        max_metric_drop: float = 0.01,
        validation_batches: int | None = 100,
        skip: list[str] | None = None,
        folder: str | None = None,
    ) -> None:
        check_choice("backend", backend, BACKENDS)
        check_choice("mode", mode, ("auto", "min", "max"))
        _check_count("calibration_batches", calibration_batches)
        if validation_batches is not None:
            _check_count("validation_batches", validation_batches)
        if isinstance(max_metric_drop, bool) or not isinstance(max_metric_drop, (int, float)):
            raise TypeError(f"max_metric_drop must be a number, got {max_metric_drop!r}.")
        if max_metric_drop != max_metric_drop:
            raise ValueError("max_metric_drop must be a number, got NaN.")
        if isinstance(skip, str):
            raise TypeError(f"skip must be a list of names, got the string {skip!r}; write [{skip!r}].")
        self.backend = backend
        self.calibration_batches = calibration_batches
        self.monitor = monitor
        self.mode = mode
        self.max_metric_drop = float(max_metric_drop)
        self.validation_batches = validation_batches
        self.skip = list(skip or ())
        self.folder = folder
        self.quantized_model: nn.Module | None = None
        self.report: QuantizationReport | None = None
        self._batches: list[Any] = []
        self._stride = 1

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        spread = (FSDPStrategy, DeepSpeedStrategy, ModelParallelStrategy)
        if stage == "fit" and isinstance(trainer.strategy, spread):
            raise MisconfigurationException(
                f"QuantizeOnFitEnd needs the whole model in one process, and {type(trainer.strategy).__name__} "
                f"spreads it over devices. Use strategy='ddp', or quantize_model() on the model from a checkpoint."
            )

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.quantized_model, self.report, self._batches = None, None, []

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        planned = float(trainer.num_training_batches)
        if trainer.max_steps > 0:
            planned = min(planned, (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches)
        self._stride = max(1, int(planned) // self.calibration_batches) if planned < float("inf") else 1

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        wanted = len(self._batches) < self.calibration_batches and batch_idx % self._stride == 0
        if wanted and trainer.is_global_zero and not _is_trial_run(trainer):
            self._batches.append(on_cpu(batch))

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if _is_trial_run(trainer):
            rank_zero_info("QuantizeOnFitEnd does nothing in fast_dev_run and barebones.")
            return
        failure: BaseException | None = None
        if trainer.is_global_zero:
            try:
                self._quantize(trainer, pl_module)
            except BaseException as error:
                failure = error
        # the other ranks wait here, and learn what came of it
        self.report, failed = trainer.strategy.broadcast((self.report, failure is not None))
        self._batches = []
        if failure is not None:
            raise failure
        if failed:
            raise QuantizationError("Quantization failed on the first rank; its log says why.")

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._batches = []

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._batches = []

    def _quantize(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._batches:
            rank_zero_warn("QuantizeOnFitEnd saw no training batch in this fit, so there is nothing to calibrate with.")
            return
        judge = Judge(
            monitor=self.monitor,
            mode=self.mode,
            max_metric_drop=self.max_metric_drop,
            monitored=_monitored(trainer),
        )
        with isolate_rng():
            made, report = try_int8(
                pl_module,
                self._batches,
                _validation_data(trainer, self.validation_batches),
                judge,
                backend=self.backend,
                skip=self.skip,
            )
        self.quantized_model = None if made is None else made.module
        folder = Path(self.folder) if self.folder is not None else Path(trainer.default_root_dir, "quantized")
        self.report = dataclasses.replace(report, folder=str(folder))
        _write(folder, self.report, self.quantized_model, None if made is None else made.recipe)
        if self.report.kept:
            rank_zero_info(self.report.describe())
        else:
            rank_zero_warn(f"QuantizeOnFitEnd kept no int8 model. {self.report.reason}")


def _write(folder: Path, report: QuantizationReport, module: nn.Module | None, recipe: Any) -> None:
    if module is not None:
        save_quantized(module, recipe, folder / MODEL_FILE)
    elif (folder / MODEL_FILE).exists():
        (folder / MODEL_FILE).replace(folder / f"{Path(MODEL_FILE).stem}.previous.pt")
    publish(folder / REPORT_FILE, lambda temporary: temporary.write_text(report.to_json() + "\n"))


def _is_trial_run(trainer: pl.Trainer) -> bool:
    return bool(getattr(trainer, "fast_dev_run", False)) or trainer.barebones


def _monitored(trainer: pl.Trainer) -> list[tuple[str, str]]:
    watching = [*trainer.checkpoint_callbacks, *trainer.early_stopping_callbacks]
    return [(c.monitor, c.mode) for c in watching if isinstance(c, (ModelCheckpoint, EarlyStopping)) and c.monitor]


def _validation_data(trainer: pl.Trainer, limit: int | None) -> ValidationData | None:
    loaders = trainer.val_dataloaders
    if not loaders:
        return None
    longest = max((float(count) for count in trainer.num_val_batches), default=0.0)
    limits = [count for count in (limit, int(longest) if longest < float("inf") else None) if count is not None]
    return ValidationData(
        loaders=loaders,
        datamodule=getattr(trainer, "datamodule", None),
        limit_batches=min(limits) if limits else None,
    )


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, got {value!r}.")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}.")

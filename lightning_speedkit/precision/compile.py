"""torch.compile from a callback: networks are compiled in place, and the run tells whether that paid.

What it does: the networks that a LightningModule holds, its repeated blocks, or the modules that are named, run
through ``torch.compile``. The steps themselves stay eager, so that ``self.log`` works in them. Names of parameters,
keys of the ``state_dict``, classes and checkpoints do not change; a copy or a pickle of the model is the plain model.
Where compiling fails, or torch declines to, the module goes on eagerly, with one warning that gives the reason.

When it helps: many small operations between the matrix products (normalizations, activations, masks), on a GPU or a
CPU with a C++ compiler; runs that are long beside the time of compiling. What it costs: seconds to minutes in the
first calls, again for inputs of another shape. Results agree to rounding, not to the bit.

Source: Ansel et al., PyTorch 2, ASPLOS 2024; asked of the Trainer in Lightning #17283 and #20242; ``self.log`` in a
compiled step fails in Lightning 2.6 with torch 2.12 and later (#21836).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn
from typing_extensions import override

from lightning_speedkit.measure.clocks import clock_for
from lightning_speedkit.measure.one_run import begin_run, is_in_another_run, refuse_second
from lightning_speedkit.precision.compile_graphs import SharedGraphs, check_backend, group_of
from lightning_speedkit.precision.compile_log import CompileLog
from lightning_speedkit.precision.compile_targets import checked_modules, compile_targets
from lightning_speedkit.precision.compile_times import CompileReport, StepWindows
from lightning_speedkit.precision.compiled_call import CompiledCall

__all__ = ["CompileModel", "compile_modules", "uncompile_modules"]


def compile_modules(
    model: nn.Module,
    modules: str | Sequence[str] = "auto",
    *,
    backend: str = "inductor",
    mode: str = "default",
    dynamic: bool | None = None,
    max_shapes: int | None = None,
    log: CompileLog | None = None,
) -> tuple[str, ...]:
    """Compiles the chosen modules in place, at their next call, and returns their paths; see :class:`CompileModel`.

    Undone by :func:`uncompile_modules`. If this raises, nothing has changed. ``log`` is told what is compiled.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    >>> compile_modules(model, "Linear", backend="eager")
    ('0',)
    >>> model(torch.ones(2, 4)).shape, list(model.state_dict())
    (torch.Size([2, 4]), ['0.weight', '0.bias'])
    >>> uncompile_modules(model)
    ('0',)
    """
    check_backend(backend, mode, dynamic, max_shapes)
    paths = compile_targets(model, modules)
    log = CompileLog() if log is None else log
    compiled: dict[Any, SharedGraphs] = {}
    for path in paths:
        module = model.get_submodule(path)
        group = group_of(module)
        if group not in compiled:
            compiled[group] = SharedGraphs(log, backend, mode, dynamic)
        module._compiled_call_impl = CompiledCall(path, module, compiled[group], log, max_shapes)
    log.listen()
    return paths


def uncompile_modules(model: nn.Module, log: CompileLog | None = None) -> tuple[str, ...]:
    """Undoes :func:`compile_modules`, or those calls of it that were given ``log``; returns the paths it changed."""
    changed = []
    for path, module in model.named_modules():
        call = vars(module).get("_compiled_call_impl")
        if isinstance(call, CompiledCall) and (log is None or call.log is log):
            del module._compiled_call_impl
            call.log.stop()
            changed.append(path)
    return tuple(changed)


class CompileModel(Callback):
    """Runs the networks of the module through torch.compile; after the run everything is as it was.

    Args:
        modules: ``"auto"`` for the networks that the LightningModule holds, ``"blocks"`` for its repeated blocks,
            which share what is compiled and so compile faster, or class names, paths or globs of paths.
        backend: One that torch knows; ``"inductor"`` needs a C++ compiler on the CPU, Triton on a GPU.
        mode: ``"default"``, ``"reduce-overhead"``, ``"max-autotune"`` or ``"max-autotune-no-cudagraphs"``.
        dynamic: ``True`` compiles for any size, ``False`` for each size anew, ``None`` for any size once one changes.
        max_shapes: So many shapes of inputs are compiled, others run eagerly. With 1, a smaller last batch of an
            epoch costs no compilation.
        eager_steps: Training batches that run before compiling begins, to know what it gains; 0 measures nothing.

    Raises:
        ValueError: If an argument is not one of those, or ``modules`` names nothing in the model.
        MisconfigurationException: If the strategy shards the model, there are two of these callbacks in one Trainer, or
            this one is in a run that goes on around this run.

    >>> CompileModel("blocks", mode="max-autotune-no-cudagraphs", max_shapes=1).report is None
    True
    """

    def __init__(
        self,
        modules: str | list[str] = "auto",
        backend: str = "inductor",
        mode: str = "default",
        dynamic: bool | None = None,
        max_shapes: int | None = None,
        eager_steps: int = 5,
    ) -> None:
        if isinstance(eager_steps, bool) or not isinstance(eager_steps, int) or eager_steps < 0:
            raise ValueError(f"eager_steps={eager_steps!r} must be a whole number of batches, from 0.")
        check_backend(backend, mode, dynamic, max_shapes)
        self.modules = checked_modules(modules)
        self.backend, self.mode, self.dynamic = backend, mode, dynamic
        self.max_shapes, self.eager_steps = max_shapes, eager_steps
        self._log = CompileLog()
        self._paths: tuple[str, ...] = ()
        self._windows: StepWindows | None = None
        self._report: CompileReport | None = None
        self._started = 0

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the modules that are compiled; empty outside a run."""
        return self._paths

    @property
    def report(self) -> CompileReport | None:
        """What compiling cost and gained in the last run, or ``None`` before its end."""
        return self._report

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if isinstance(trainer.strategy, (FSDPStrategy, DeepSpeedStrategy, ModelParallelStrategy)):
            raise MisconfigurationException(
                f"CompileModel does not go with {type(trainer.strategy).__name__}, which shards the model. Call "
                f"compile_modules(self, 'blocks') in configure_model, before the blocks are sharded."
            )
        refuse_second(trainer, CompileModel, "would compile the same networks. Keep one; it takes a list of modules.")
        begin_run(self, trainer)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin(pl_module)  # only now is everything built that setup and configure_model build
        self._log.active = self.eager_steps == 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        clock = clock_for(pl_module.device)
        self._windows = StepWindows(clock, self.eager_steps, trainer.accumulate_grad_batches)
        self._log.active = not self._windows.is_eager

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._windows is not None:
            self._log.active = not self._windows.is_eager
            self._started = self._log.started
            self._windows.begin()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._windows is not None:
            self._windows.end(self._log.started != self._started)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._finish()
        if self._report is not None and self._report.steps:
            rank_zero_info(f"CompileModel: {self._report}")

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin(pl_module)

    @override
    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin(pl_module)

    @override
    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin(pl_module)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if not is_in_another_run(self, trainer):
            self._undo(pl_module)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if not is_in_another_run(self, trainer):
            self._undo(pl_module)

    def _begin(self, pl_module: pl.LightningModule) -> None:
        if self._paths:
            return
        self._log, self._windows, self._report = CompileLog(), None, None
        self._paths = compile_modules(
            pl_module,
            self.modules,
            backend=self.backend,
            mode=self.mode,
            dynamic=self.dynamic,
            max_shapes=self.max_shapes,
            log=self._log,
        )

    def _finish(self) -> None:
        log, windows = self._log, self._windows
        log.settle()
        self._report = CompileReport(
            paths=self._paths,
            never_called=tuple(path for path in self._paths if path not in log.called),
            failures=tuple(log.failures.items()),
            recompiles=tuple((path, tuple(shapes)) for path, shapes in log.recompiles.items()),
            graphs=log.graphs,
            compile_seconds=log.seconds,
            eager_seconds=windows.eager_seconds if windows else None,
            compiled_seconds=windows.compiled_seconds if windows else None,
            steps=windows.steps if windows else 0,
        )
        if self._report.never_called and (log.called or self._report.steps):
            rank_zero_warn(
                f"CompileModel: {', '.join(self._report.never_called[:4])} was compiled but never called as a module; "
                f"compiling it changes nothing. Name the modules inside it that are called."
            )

    def _undo(self, pl_module: pl.LightningModule) -> None:
        if self._paths and self._report is None:
            self._finish()
        uncompile_modules(pl_module, self._log)
        self._log.stop()
        self._paths = ()

"""Removes channels, units and heads from a network, so that it is smaller on any device.

What it does: ``shrink_model`` takes a model and an example of its input and removes the least important channels of
each layer together with everything that belongs to them; ``StructuredPruning`` does it while ``trainer.fit`` runs, in
one step or several, and lets the optimizer go on with what is left. The weights that stay are the same parameters with
the same names.

When it helps: wide layers. Half the channels leave a quarter of the multiply-adds. What it costs: accuracy at first,
which some epochs of further training bring back at least in part.

Source: G. Fang et al., "DepGraph: Towards Any Structural Pruning" (2023), whose torch-pruning says which channels
belong together. torch-pruning itself makes new parameters, and an optimizer goes on with the old ones without a word;
here the parameters stay the same objects. A checkpoint of a pruned network that no longer loads is Torch-Pruning #436;
pruning and quantizing in one run was asked for in Lightning #11047.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_speedkit.compress.calls import Call
from lightning_speedkit.compress.choice import check_choice
from lightning_speedkit.compress.float_copy import float_copy
from lightning_speedkit.compress.quantize_arguments import check_skip
from lightning_speedkit.compress.quantize_fit import is_trial_run, why_untrained
from lightning_speedkit.compress.shrink_best import warn_of_another_size
from lightning_speedkit.compress.shrink_choice import CRITERIA
from lightning_speedkit.compress.shrink_cut import apply_plan, given_gradients, gradients_of
from lightning_speedkit.compress.shrink_graph import torch_pruning
from lightning_speedkit.compress.shrink_plan import ShrinkPlan, ShrinkSettings, plan_shrink
from lightning_speedkit.compress.shrink_refusals import (
    refuse_arguments,
    refuse_judging,
    refuse_module,
    refuse_optimizers,
    refuse_run,
)
from lightning_speedkit.compress.shrink_report import ShrinkReport
from lightning_speedkit.compress.shrink_resize import follow_checkpoints, load_shrunk, mark, original_sizes, resize_to
from lightning_speedkit.compress.shrink_run import ShrinkRun
from lightning_speedkit.measure.own_random_numbers import own_random_numbers

__all__ = ["ShrinkPlan", "ShrinkReport", "StructuredPruning", "load_shrunk", "resize_to", "shrink_model"]


def shrink_model(
    model: nn.Module,
    example: Any,
    ratio: float = 0.5,
    *,
    head_ratio: float = 0.0,
    criterion: str = "magnitude",
    skip: Sequence[str] = (),
    round_to: int = 1,
    across_norms: bool = False,
    optimizers: Iterable[Optimizer] = (),
) -> ShrinkPlan:
    """Removes channels from ``model`` in place and returns which; parameters stay the same objects.

    A layer's channels go together with whatever is tied to them: the norm behind it, the layers of a residual sum, the
    inputs of the next layers. Before anything is changed, a copy is cut and has to compute what ``model`` computes with
    zeros in their place; layers for which that fails stay whole. So do the outputs of the network, layers next to a
    recurrent one or an ``nn.MultiheadAttention``, and channels that a LayerNorm or GroupNorm averages over.

    Args:
        model: On any device, in any mode; neither is changed.
        example: A tensor, a tuple of arguments or a dict of keyword arguments for ``model``, of two samples or more.
        ratio: The share of each layer's channels that goes, at least 0 and below 1; what stays is rounded up.
        head_ratio: The share of the heads of each attention that goes. It has to be a module with a number of heads and
            Linear layers of usual names, such as timm's ``Attention``.
        criterion: ``"magnitude"``, ``"taylor"`` (by the gradients that the parameters hold) or ``"random"``.
        skip: Names of modules that keep their output channels, or their heads, with all inside them; ``*`` and ``?``
            are wildcards.
        round_to: The channels that stay are a multiple of this, where the layer has so many.
        across_norms: Also remove channels that a LayerNorm, RMSNorm or GroupNorm averages over, such as the width of a
            transformer. What is left then computes something else, and needs more training.
        optimizers: Optimizers of ``model``, whose state is cut alike.

    Raises:
        MissingExtraError: torch-pruning is not installed.
        MisconfigurationException: ``model`` is compiled, scripted or lazy, or has parametrizations or pruning masks.
        ValueError: An argument is out of range, or an entry of ``skip`` matches no module.
        SpeedkitError: the graph of ``model`` could not be followed.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> plan = shrink_model(model, torch.randn(2, 4), 0.5)
    >>> plan.layers, model[2].weight.shape
    ({'0': (8, 4)}, torch.Size([2, 4]))
    """
    refuse_arguments(ratio, head_ratio, {"round_to": round_to}, skip, None)
    check_choice("criterion", criterion, tuple(CRITERIA))
    refuse_module(model)
    optimizers = list(optimizers)
    refuse_optimizers(optimizers)
    check_skip(model, skip)
    settings = ShrinkSettings(
        ratio=ratio,
        head_ratio=head_ratio,
        criterion=criterion,
        skip=tuple(skip),
        round_to=round_to,
        across_norms=across_norms,
    )
    with own_random_numbers():
        plan = plan_shrink(
            float_copy(model),
            [_example_call(example)],
            settings,
            original=original_sizes(model),
            gradients=given_gradients(gradients_of(model), criterion),
        )
    apply_plan(model, plan, optimizers)
    return plan


def _example_call(example: Any) -> Call:
    def on_cpu(value: Any) -> Any:
        if isinstance(value, Tensor):
            value = value.detach().cpu()
            return value.float() if value.is_floating_point() else value
        return value

    if isinstance(example, dict):
        return Call("", (), {name: on_cpu(value) for name, value in example.items()})
    return Call("", tuple(on_cpu(value) for value in (example if isinstance(example, tuple) else (example,))), {})


class StructuredPruning(Callback):
    """Removes channels, units and heads while ``fit`` runs, and lets the training go on with the smaller network.

    At the first batch of ``start_epoch``, and then every ``every_epochs`` epochs until ``steps`` steps are done, the
    network loses an equal share of its channels, chosen and checked as by :func:`shrink_model`. Optimizers keep their
    state for what stays, learning rate schedules go on, and under DDP all ranks cut alike and wrap the model again.

    With ``max_metric_drop`` each step is judged ``every_epochs`` epochs later, or at the end of the fit: if the metric
    is then worse by more than that than before the step, weights and optimizer state from before it are put back
    exactly, and no further step follows. A copy of both is kept in memory, and in checkpoints, until it is judged.

    Checkpoints are marked with what was removed. The Trainer that has this callback resizes the model to any checkpoint
    it loads. Elsewhere use :func:`load_shrunk`, or call :func:`resize_to` in the module's ``on_load_checkpoint``.

    ``report`` is a :class:`ShrinkReport` after the fit, also written as ``report.json`` to ``folder`` and logged.
    Nothing is done in ``fast_dev_run`` and ``barebones``. FSDP, DeepSpeed, ModelParallelStrategy, compiled models and
    weight averaging are refused.

    Args:
        ratio: The share of each layer's channels that is gone after the last step.
        head_ratio: The share of the heads of each attention.
        steps: In how many equal steps.
        start_epoch: The epoch of the first step, counted from 0.
        every_epochs: Epochs from one step to the next.
        criterion: ``"magnitude"``, ``"taylor"`` (by the gradients of the last optimizer step before) or ``"random"``.
        skip: Names of modules that keep their output channels or heads, with all inside them; ``*`` and ``?`` are
            wildcards. One that matches none is an error.
        round_to: The channels that stay are a multiple of this.
        across_norms: Also remove channels that a LayerNorm, RMSNorm or GroupNorm averages over.
        max_metric_drop: The largest loss of quality that is kept: a difference for a metric to maximize (its share
            where it is above 1), a relative increase for one to minimize. ``None`` keeps every step.
        monitor: The validation metric to judge by; by default the one that ModelCheckpoint or EarlyStopping watches.
            Without ``max_metric_drop`` it has no effect, which is a warning.
        folder: Where ``report.json`` goes; ``None`` is ``shrunk`` in the Trainer's ``default_root_dir``.

    >>> callback = StructuredPruning(ratio=0.5, steps=2)
    >>> callback.epochs
    [1, 2]
    """

    def __init__(
        self,
        ratio: float = 0.5,
        head_ratio: float = 0.0,
        steps: int = 1,
        start_epoch: int = 1,
        every_epochs: int = 1,
        criterion: str = "magnitude",
        skip: list[str] | None = None,
        round_to: int = 1,
        across_norms: bool = False,
        max_metric_drop: float | None = None,
        monitor: str | None = None,
        folder: str | None = None,
    ) -> None:
        counts = {"steps": steps, "start_epoch": start_epoch, "every_epochs": every_epochs, "round_to": round_to}
        refuse_arguments(ratio, head_ratio, counts, skip, max_metric_drop)
        check_choice("criterion", criterion, tuple(CRITERIA))
        self.ratio = ratio
        self.head_ratio = head_ratio
        self.steps = steps
        self.start_epoch = start_epoch
        self.every_epochs = every_epochs
        self.criterion = criterion
        self.skip = list(skip or ())
        self.round_to = round_to
        self.across_norms = across_norms
        self.max_metric_drop = max_metric_drop
        self.monitor = monitor
        self.folder = folder
        self.report: ShrinkReport | None = None
        self._run = ShrinkRun()
        self._has_begun = False

    @property
    def epochs(self) -> list[int]:
        """The epochs at whose first batch a step is due."""
        return [self.start_epoch + step * self.every_epochs for step in range(self.steps)]

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if is_trial_run(trainer):
            rank_zero_info("StructuredPruning does nothing in fast_dev_run and barebones.")
            return
        follow_checkpoints(pl_module)
        if stage != "fit":
            return
        self.report, self._run, self._has_begun = None, ShrinkRun(), False
        if self._removes_something():
            refuse_run(trainer, pl_module)
            torch_pruning()  # a missing library is said before the first epoch
            if self.max_metric_drop is not None:
                self._run.metric, self._run.mode = refuse_judging(trainer, self.monitor, self.start_epoch)
            elif self.monitor is not None:
                rank_zero_warn(
                    f"StructuredPruning(monitor={self.monitor!r}) has no effect without max_metric_drop: no step is "
                    "judged. Set max_metric_drop, or leave monitor out."
                )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._has_begun = True
        if self._removes_something() and not is_trial_run(trainer):
            refuse_optimizers(trainer.optimizers)
            check_skip(pl_module, self.skip)
        late = [epoch for epoch in self.epochs if trainer.max_epochs not in (None, -1) and epoch >= trainer.max_epochs]
        if late and self._removes_something() and not is_trial_run(trainer):
            rank_zero_warn(
                f"StructuredPruning has {len(late)} of {self.steps} steps after the last epoch (at the start of epoch "
                f"{', '.join(map(str, late))}, and max_epochs={trainer.max_epochs}), which will not be done."
            )

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        run, epoch = self._run, trainer.current_epoch
        if run.epoch == epoch or is_trial_run(trainer) or not self._removes_something():
            return
        run.epoch = epoch
        if run.pending is not None and epoch >= run.pending["epoch"] + self.every_epochs:
            run.judge(trainer, pl_module, self.max_metric_drop)
        if epoch in self.epochs and not run.undone:
            done = self.epochs.index(epoch) + 1
            run.step(trainer, pl_module, batch, self._settings().part(done, self.steps), self.max_metric_drop)
            run.steps_done = done

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._run.note_validation(trainer)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if self.criterion == "taylor" and trainer.current_epoch + 1 in self.epochs and not is_trial_run(trainer):
            self._run.note_gradients(pl_module)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if is_trial_run(trainer) or not self._removes_something():
            return
        if self._run.pending is not None:
            self._run.judge(trainer, pl_module, self.max_metric_drop)
        report = self._run.report(pl_module, self._settings(), self.max_metric_drop) if trainer.is_global_zero else None
        self.report = trainer.strategy.broadcast(report)
        if trainer.is_global_zero and self.report is not None:
            self._publish(trainer, self.report)

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero and not is_trial_run(trainer):
            warn_of_another_size(trainer, pl_module)
            if not self._has_begun and self._removes_something():
                rank_zero_warn(f"StructuredPruning did nothing: no batch was trained ({why_untrained(trainer)}).")

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        mark(pl_module, checkpoint)

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._run.state()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._run.load(state_dict)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if not original_sizes(pl_module):
            follow_checkpoints(pl_module, on=False)

    def _settings(self) -> ShrinkSettings:
        return ShrinkSettings(
            ratio=self.ratio,
            head_ratio=self.head_ratio,
            criterion=self.criterion,
            skip=tuple(self.skip),
            round_to=self.round_to,
            across_norms=self.across_norms,
        )

    def _removes_something(self) -> bool:
        return self.ratio > 0 or self.head_ratio > 0

    def _publish(self, trainer: pl.Trainer, report: ShrinkReport) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(report.numbers(), step=trainer.global_step)
        path = Path(self.folder) if self.folder is not None else Path(trainer.default_root_dir, "shrunk")
        try:
            path.mkdir(parents=True, exist_ok=True)
            temporary = path / "report.json.part"
            temporary.write_text(report.to_json() + "\n")
            temporary.replace(path / "report.json")
        except OSError as error:  # the run is over: it is not to fail for that
            rank_zero_warn(f"StructuredPruning could not write its report to {path} ({error}); it is in `report`.")
        (rank_zero_info if report.layers else rank_zero_warn)(f"StructuredPruning: {report.describe()}")

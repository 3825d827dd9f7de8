"""Sets weights to zero, gradually while the model trains, until exactly the share that was asked for is zero.

What it does: ``prune_weights`` prunes a model once; ``Pruning`` does it step by step in ``trainer.fit``, along a cubic
schedule, so that the weights that are left can take over. Weights go by their magnitude or by their movement; all
layers compete, or each is pruned alike; two of each four inputs where a GPU can make use of it.

When it helps: a model whose file compresses well, sparse runtimes, and with ``pattern="2:4"`` matrix products on GPUs
with sparse tensor cores. It does not make a dense runtime faster: zeros are multiplied like other numbers. What it
costs: one pass over the weights and one over their gradients per optimizer step; for the masks a byte per weight, and
as many as the weights have; for the movement criterion four more, and four during a step.

How: nothing in the model is replaced or renamed, unlike with ``torch.nn.utils.prune``, so checkpoints, averages, DDP,
compiled code and activation checkpointing work as before. Gradients of pruned weights are set to zero before they are
clipped, weights after each optimizer step, by hooks of the optimizer itself.

Sources: Zhu and Gupta 2017 (arXiv 1710.01878) for the schedule; Sanh et al. 2020 (arXiv 2005.07683) for movement; Evci
et al. 2020 (arXiv 1911.11134) for regrowth. Lightning's ``ModelPruning`` takes its amount from what is left each time,
so that no target can be set, and counts layers twice in its log (Lightning #13595).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn
from typing_extensions import override

from lightning_speedkit.compress.float_copy import copy_module
from lightning_speedkit.compress.module_names import check_names
from lightning_speedkit.compress.prune_arguments import (
    check_pruning,
    check_sparsity,
    planned_steps,
    refuse_pruning,
    resolved_steps,
    run_last,
)
from lightning_speedkit.compress.prune_fit import FitPruning
from lightning_speedkit.compress.prune_masks import PruningMasks
from lightning_speedkit.compress.prune_semi_structured import runs_semi_structured, to_semi_structured
from lightning_speedkit.compress.prune_targets import frozen_weights, prunable_weights
from lightning_speedkit.compress.quantize_fit import is_trial_run, why_untrained
from lightning_speedkit.measure.lightning_hooks import leave_logged
from lightning_speedkit.measure.lightning_internals import logs_this_step
from lightning_speedkit.measure.one_of_a_kind import OneOfAKind

__all__ = ["Pruning", "PruningMasks", "prune_weights"]


def prune_weights(
    model: nn.Module,
    sparsity: float = 0.8,
    *,
    scope: str = "global",
    pattern: str | None = None,
    skip: Sequence[str] = (),
) -> PruningMasks:
    """Set the smallest weights of a model to zero, in place and at once.

    Args:
        model: Its linear, convolutional, attention and recurrent layers are pruned.
        sparsity: The share of their weights that is zero afterwards, to the element; 0.5 with a pattern.
        scope: ``"global"``: all weights compete. ``"layer"``: each layer gets this sparsity.
        pattern: ``"2:4"``: two of each four consecutive inputs of a layer.
        skip: Names of layers to leave as they are; ``*`` and ``?`` are wildcards.

    Returns:
        The masks, to keep the zeros in further training: :meth:`PruningMasks.hold`.

    Raises:
        ValueError: An argument is not allowed, there is nothing to prune, or the model has more zeros already.
        TypeError: An argument is of another type.

    >>> model = nn.Linear(4, 2)
    >>> masks = prune_weights(model, 0.75)
    >>> int((model.weight == 0).sum()), masks.sparsity()
    (6, 0.75)
    """
    check_pruning(scope=scope, pattern=pattern)
    wanted = check_sparsity("sparsity", sparsity, pattern)
    masks = PruningMasks(prunable_weights(model, check_names("skip", skip), pattern), scope, pattern)
    masks.take_zeros()
    masks.refuse_below(wanted)
    masks.prune_to(wanted)
    masks.apply()
    return masks


class Pruning(OneOfAKind):
    """Prunes gradually in ``fit`` to a sparsity that is then reached to the element, and held.

    From ``start`` to ``end`` the sparsity rises as Zhu and Gupta propose, at first fast and then ever slower; after
    ``end`` what is left goes on training. Weights that are zero when ``fit`` starts, in layers that are not zero as a
    whole, count as pruned already. The masks are in the checkpoint, and a resumed run goes on exactly as an unbroken
    one. An average of the weights that another callback puts into the module or a checkpoint is as sparse as they are.

    The sparsity is logged when it has changed: ``sparsity``, and ``sparsity/<weight>`` for each one. ``masks`` are the
    masks; ``accelerated_model`` is, with a pattern and on a GPU with sparse tensor cores, a copy of the module for
    inference there, made when ``fit`` ends, and else ``None``.

    The callback moves itself behind the others in the Trainer's list, but for those that save checkpoints.

    Args:
        target_sparsity: The share of the weights of linear, convolutional, attention and recurrent layers that is zero
            in the end; 0.8 if not given, and 0.5 with a pattern. 0.0 changes nothing.
        criterion: What goes first: weights of small ``"magnitude"``, or those whose ``"movement"`` since the start of
            the run, summed over the steps, was towards zero. That is for fine-tuning, where few weights are small
            because of what is trained.
        scope: ``"global"``: all weights compete, and layers end with different sparsities. ``"layer"``: each layer
            gets the same.
        start: Optimizer steps before the first weights go; a ``float`` up to 1 is that share of the run.
        end: Optimizer steps until the target is reached, or a share of the run.
        every: Prune once in so many steps; if not given, a hundred times from ``start`` to ``end``.
        pattern: ``"2:4"``: two of each four consecutive inputs.
        regrow: At each time, the share of the weights left that is pruned in addition, while as many pruned ones with
            the largest gradients come back at zero. It falls to 0 at ``end``, as a cosine does.
        skip: Names of layers to leave as they are; ``*`` and ``?`` are wildcards.

    Raises:
        ValueError: An argument is not allowed. At ``fit``: nothing to prune, a name in ``skip`` that matches nothing,
            layers whose inputs do not go with the pattern, or more zeros than the target already.
        TypeError: An argument is of another type.
        MisconfigurationException: At ``fit``: a strategy other than one device and DDP, a second callback that prunes,
            or a share of a run whose length is not known.

    Example:

        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> model, short = BoringModel(), {"max_epochs": 1, "limit_train_batches": 10, "limit_val_batches": 0}
        >>> trainer = Trainer(callbacks=Pruning(0.75), accelerator="cpu", barebones=True, **short)
        >>> trainer.fit(model)
        >>> int((model.layer.weight == 0).sum()), model.layer.weight.numel()
        (48, 64)
    """

    def __init__(
        self,
        target_sparsity: float | None = None,
        criterion: str = "magnitude",
        scope: str = "global",
        start: int | float = 0.1,
        end: int | float = 0.7,
        every: int | None = None,
        pattern: str | None = None,
        regrow: float = 0.0,
        skip: list[str] | None = None,
    ) -> None:
        super().__init__()
        check_pruning(
            scope=scope, pattern=pattern, criterion=criterion, start=start, end=end, every=every, regrow=regrow
        )
        given = target_sparsity if target_sparsity is not None else 0.8 if pattern is None else 0.5
        self.target_sparsity = check_sparsity("target_sparsity", given, pattern)
        self.criterion, self.scope, self.pattern = criterion, scope, pattern
        self.start, self.end, self.every = start, end, every
        self.regrow = float(regrow)
        self.skip = check_names("skip", skip)
        self.accelerated_model: nn.Module | None = None
        self._fit: FitPruning | None = None
        self._loaded: dict[str, Any] = {}
        self._is_averaged = False  # whether another callback puts an average of the weights into the module
        self._is_new = self._was_logged = False  # the sparsity, not logged yet, and logged in the last step

    @property
    def masks(self) -> PruningMasks | None:
        """Of the last ``fit``, or the one that is running; ``None`` before it, and with a target of 0."""
        return None if self._fit is None else self._fit.masks

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        self.accelerated_model = None
        self._end()
        self._fit, self._loaded = None, {}
        if self.target_sparsity:
            refuse_pruning(trainer, Pruning)
            self._is_averaged = run_last(trainer, self)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.target_sparsity:
            return
        start, end = resolved_steps(trainer, self.start, self.end, self._loaded)
        masks = PruningMasks(prunable_weights(pl_module, self.skip, self.pattern), self.scope, self.pattern)
        self._fit = FitPruning(
            masks,
            target=self.target_sparsity,
            movement=self.criterion == "movement",
            start=start,
            end=end,
            every=self.every or max(1, (end - start) // 100),
            regrow=self.regrow,
        )
        self._fit.frozen = frozen_weights(pl_module, self.skip)
        self._fit.begin(self._loaded)
        self._warn_if_late(trainer)
        self._is_new = True
        for optimizer in trainer.optimizers:
            self._fit.follow(optimizer)
        self._fit.prune_if_due(trainer.global_step, trainer.optimizers)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._fit is not None:
            self._fit.find_weights(pl_module)
            self._fit.masks.apply()  # StochasticWeightAveraging has put an average there

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self._fit is not None:
            self._fit.before_step(optimizer, trainer.global_step + 1)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._fit is None:
            return
        if self._fit.is_due(trainer.global_step):
            self._fit.find_weights(pl_module)
            self._is_new |= self._fit.prune_if_due(trainer.global_step, trainer.optimizers)
        if (self._was_logged or self._is_new) and not trainer.barebones:
            self._log(trainer, pl_module, self._fit)

    @override
    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._fit is not None and self._is_averaged and trainer.state.fn == TrainerFn.FITTING:
            self._fit.masks.apply()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._fit is None:
            return
        self._fit.masks.apply()
        if not self._fit.is_done and not self._fit.is_told:
            rank_zero_warn(
                f"Pruning ended at a sparsity of {self._fit.masks.sparsity():.3f} and not at "
                f"{self.target_sparsity:g}: the run was over after {trainer.global_step} steps, before its "
                f"end={self.end!r} ({self._fit.end} steps). Choose an earlier end."
            )

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._fit is None and self.target_sparsity and not is_trial_run(trainer):
            rank_zero_warn(f"Pruning did nothing: no batch was trained ({why_untrained(trainer)}).")
        device = trainer.strategy.root_device
        if self._fit is None or self.pattern is None or not self._fit.is_done or not runs_semi_structured(device):
            return
        twin = copy_module(pl_module).to(device).eval().requires_grad_(False)
        told = to_semi_structured(twin)
        done = sum(word == "converted" for word in told.values())
        if done:
            self.accelerated_model = twin
        why = "; ".join(f"{name}: {word}" for name, word in told.items() if word != "converted")
        rank_zero_info(f"Pruning converted {done} of {len(told)} linear layers of a copy to 2:4. {why}")

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._end()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._end()

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._loaded if self._fit is None else self._fit.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._fit is not None and self._is_averaged:  # the average in it, not the module's own tensors
            checkpoint["state_dict"] = self._fit.masked_state(pl_module, checkpoint["state_dict"])

    def _log(self, trainer: pl.Trainer, pl_module: pl.LightningModule, fit: FitPruning) -> None:
        masks = fit.masks
        if self._was_logged:
            leave_logged(trainer, "sparsity", *(f"sparsity/{name}" for name in masks.weights))
        logs = self._is_new and logs_this_step(trainer)
        self._was_logged = self._is_new and (logs or fit.is_done)
        if self._was_logged:
            counts = masks.counts()
            shares = {f"sparsity/{name}": counts[name] / weight.numel() for name, weight in masks.weights.items()}
            pl_module.log_dict({"sparsity": sum(counts.values()) / masks.total(), **shares})
        self._is_new &= not logs

    def _warn_if_late(self, trainer: pl.Trainer) -> None:
        total = planned_steps(trainer)
        if self._fit is not None and total is not None and total < self._fit.end and not self._fit.is_done:
            self._fit.is_told = True
            rank_zero_warn(
                f"Pruning will not reach {self.target_sparsity:g}: its end={self.end!r} comes after {self._fit.end} "
                f"steps, and the run has {total}. Choose an earlier end, or a share of the run such as end=0.7."
            )

    def _end(self) -> None:
        self._is_new = self._was_logged = False
        if self._fit is not None:
            self._fit.finish()

"""Activation checkpointing: blocks keep their inputs only, and compute their insides again in the backward pass.

What it does: each chosen block runs through ``torch.utils.checkpoint`` while it trains; by policy it also keeps the
outputs of its expensive operations, or computes nothing again and keeps what it saves in host memory. The result is the
same bit for bit: the recomputation draws the same random numbers (of torch, ``random`` and ``numpy.random``), autocast
is the same, and buffers (the statistics of BatchNorm, the vectors of spectral norm, any counter in a buffer) advance
once per batch. The names of parameters, the keys of the ``state_dict``, ``isinstance`` and the printed model do not
change; a copy or a pickle of the model is the plain model.

When it helps: the activations, not the weights, fill the memory; deep models, long sequences, large images.
What it costs: one more forward of those blocks, in theory a third of the step when everything is checkpointed.

Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016; pytorch#96136 (BatchNorm advances twice under
plain checkpointing); asked of Lightning since #49 and #1308.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn
from typing_extensions import override

from lightning_speedkit.measure.sync_batch_norm import holds_sync_batch_norm
from lightning_speedkit.memory.block_selection import checked_selection, select_modules
from lightning_speedkit.memory.checkpoint_budget import CheckpointPlan, checked_budget
from lightning_speedkit.memory.checkpoint_policy import Offload, Policy, Recompute, checked_policy
from lightning_speedkit.memory.checkpoint_policy_batch import plan_for_batch, refuse_budget
from lightning_speedkit.memory.checkpoint_policy_refusals import (
    SYNC_BATCH_NORM,
    checked_every,
    refuse_nested,
    refuse_what_cannot_be_exchanged,
    warn_of_what_happens_twice,
)
from lightning_speedkit.memory.recomputation import Recomputed, plain_class, recomputed_class

__all__ = ["ActivationCheckpointing", "checkpoint_modules", "uncheckpoint_modules"]


def checkpoint_modules(
    model: nn.Module,
    modules: str | Sequence[str] = "auto",
    *,
    policy: str = "full",
    every: int = 1,
    keep: Sequence[str] | None = None,
    min_bytes: int | None = None,
) -> tuple[str, ...]:
    """Makes the chosen modules recompute their activations, in place, and returns the paths of those it changed.

    A module that is checkpointed in the same way already stays so and is not returned. If this raises, nothing has
    changed. In eval mode and under ``torch.no_grad`` the modules run as before.

    Args:
        model: The model that holds them; it may be on any device and in any mode.
        modules: ``"auto"`` (the repeated blocks), or one or more class names, paths, or globs of paths such as
            ``"encoder.layers.*"``.
        policy: ``"full"`` (recompute everything), ``"selective"`` (recompute the cheap operations), or ``"offload"``
            (recompute nothing; what the backward needs waits in host memory).
        every: Of the chosen modules take the first and every ``every``-th after it.
        keep: Of ``"selective"``: what is not recomputed. Classes of operations (``"matmul"``, ``"batched-matmul"``,
            ``"attention"``, ``"convolution"``) or single ones (``"aten._softmax"``). If not given: all classes but
            ``"batched-matmul"``.
        min_bytes: Of ``"offload"``: saved tensors below this size stay on the device; 1 MiB if not given.

    Raises:
        ValueError: If a name means nothing in the model, a chosen module lies in another, is checkpointed already in
            another way, or cannot be recomputed exactly, or an option does not go with the policy.
        TypeError: If ``modules`` is neither a string nor a list of strings, or an option has the wrong type.

    >>> import torch
    >>> block = lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.5))
    >>> model = nn.Sequential(block(), block(), nn.Linear(4, 1))
    >>> checkpoint_modules(model)
    ('0', '1')
    >>> model(torch.ones(2, 4)).sum().backward()  # the same loss and gradients, with less memory in between
    >>> uncheckpoint_modules(model)
    ('0', '1')
    """
    how = checked_policy(policy, keep, min_bytes)
    chosen = select_modules(model, modules)[:: checked_every(every)]
    refuse_nested(model, chosen)
    new = []
    for path in chosen:
        module = model.get_submodule(path)
        refuse_what_cannot_be_exchanged(path, module)
        if not isinstance(module, Recomputed):
            new.append(path)
        elif type(module).checkpoint_policy != how:
            raise ValueError(
                f"modules: {path!r} is checkpointed already, with another policy. Undo that first with "
                f"uncheckpoint_modules, or give the same policy."
            )
        if isinstance(how, Recompute) and holds_sync_batch_norm(module):
            raise ValueError(SYNC_BATCH_NORM.format(path=path))
    if new and isinstance(how, Recompute):
        warn_of_what_happens_twice(model, new)
    return _set_classes(model, new, how)


def uncheckpoint_modules(model: nn.Module, paths: Sequence[str] | None = None) -> tuple[str, ...]:
    """Undoes :func:`checkpoint_modules`, for the given paths or for all, and returns the paths that it changed."""
    changed = []
    at = dict(model.named_modules(remove_duplicate=False))  # a module may be at several paths
    wanted = {at.get(path) for path in (at if paths is None else paths)}
    for path, module in model.named_modules():
        if not isinstance(module, Recomputed) or module not in wanted:
            continue
        plain = plain_class(type(module))
        if plain is type(module):
            rank_zero_warn(f"{path!r} stays checkpointed: something else has set its class to {plain.__name__} since.")
            continue
        model.get_submodule(path).__class__ = plain
        changed.append(path)
    return tuple(changed)


def _set_classes(model: nn.Module, paths: Sequence[str], policy: Policy) -> tuple[str, ...]:
    for path in paths:
        module = model.get_submodule(path)
        try:
            module.__class__ = recomputed_class(type(module), policy)
        except TypeError as error:  # a class with __slots__, or one that cannot be subclassed
            uncheckpoint_modules(model, paths)
            raise ValueError(
                f"modules: {path!r} cannot be checkpointed, because its class {type(module).__name__} cannot be "
                f"exchanged: {error}. Choose a module inside or around it."
            ) from error
    return tuple(paths)


class ActivationCheckpointing(Callback):
    """Trains with activation checkpointing of the chosen modules; after the fit everything is as it was.

    Args:
        modules: ``"auto"`` for the repeated blocks of the model (transformer blocks, residual blocks), or a class
            name (``"Block"``), the path of a module (``"encoder.layers.3"``), a glob of paths in which ``*`` stands
            for one name (``"encoder.layers.*"``), or a list of these.
        policy: ``"full"``, ``"selective"`` or ``"offload"``, see :func:`checkpoint_modules`.
        every: Take the first of these modules and every ``every``-th after it.
        keep: Of ``policy="selective"``: operations that are not computed again, see :func:`checkpoint_modules`.
        min_bytes: Of ``policy="offload"``: smaller saved tensors stay on the device; 1 MiB if not given.
        budget: The most bytes of activations in a step, as ``"4GB"`` or as a fraction of those without checkpointing.
            Of ``modules``, those are chosen that keep it at the least extra time, by trial steps on the first batch,
            see :func:`~lightning_speedkit.memory.checkpoint_budget.plan_checkpoints`. What was chosen is logged once.

    Attributes:
        plan: With a budget, the :class:`~lightning_speedkit.memory.checkpoint_budget.CheckpointPlan` of the last fit;
            ``None`` before its first batch.

    Raises:
        ValueError: At once, if an option is wrong; at the start of the fit, if a name means nothing in the model (the
            message says what is there) or a module cannot be checkpointed; at the first batch, if the budget is below
            what is possible (the message says what is).
        MisconfigurationException: If the strategy has checkpointing of its own (FSDP, DeepSpeed), or makes
            SyncBatchNorm of the modules to recompute.

    >>> ActivationCheckpointing(["Block", "decoder.layers.*"]).modules
    ('Block', 'decoder.layers.*')
    """

    def __init__(
        self,
        modules: str | list[str] = "auto",
        policy: str = "full",
        every: int = 1,
        keep: list[str] | None = None,
        min_bytes: int | None = None,
        budget: str | float | None = None,
    ) -> None:
        if budget is not None and (checked_budget(budget), policy, every) != (budget, "full", 1):
            raise ValueError(
                f"budget={budget!r} chooses the modules to recompute; it goes with policy='full' and every=1, "
                f"got policy={policy!r} and every={every!r}."
            )
        self.budget = budget
        self.modules = checked_selection(modules)
        self.policy, self.every, self.min_bytes = policy, checked_every(every), min_bytes
        self.keep = None if keep is None else list(keep)
        self._moves_out = isinstance(checked_policy(policy, keep, min_bytes), Offload)
        self._paths: tuple[str, ...] = ()
        self._taken: set[nn.Module] = set()  # in setup; configure_model may put them elsewhere
        self.plan: CheckpointPlan | None = None  # of the budget, from the first batch of a fit to the start of the next

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the modules that this callback has checkpointed; empty outside a fit."""
        return self._paths

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self.plan = None
        if isinstance(trainer.strategy, (FSDPStrategy, DeepSpeedStrategy)):
            raise MisconfigurationException(
                f"ActivationCheckpointing does not go with {type(trainer.strategy).__name__}, which wraps the model. "
                f"Use FSDPStrategy(activation_checkpointing_policy=...) or DeepSpeed's own checkpointing."
            )
        # fully_shard in configure_model puts a class of its own over each block's, and ours goes over that.
        if self.budget is not None or isinstance(trainer.strategy, ModelParallelStrategy):
            return
        # What is there already is taken now: BatchSizeFinder tries its sizes before our on_fit_start.
        with suppress(ValueError):
            self._paths = self._checkpoint(pl_module)
            self._taken = {pl_module.get_submodule(path) for path in self._paths}

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.budget is not None:
            refuse_budget(trainer, pl_module)
            return
        # The module's own setup and configure_model come after our setup, and so does sync_batchnorm=True.
        self._paths = tuple(path for path, module in pl_module.named_modules() if module in self._taken)
        for path, module in pl_module.named_modules():
            if path in self._paths and not self._moves_out and holds_sync_batch_norm(module):
                raise MisconfigurationException(SYNC_BATCH_NORM.format(path=path))
        if self.every > 1:  # of what has been built since, others may be the ones to take
            wanted = select_modules(pl_module, self.modules)[:: self.every]
            gone = uncheckpoint_modules(pl_module, [path for path in self._paths if path not in wanted])
            self._paths = tuple(path for path in self._paths if path not in gone)
        self._paths = tuple(dict.fromkeys(self._paths + self._checkpoint(pl_module)))
        if self._moves_out and trainer.strategy.root_device.type == "cpu":
            rank_zero_warn("policy='offload' changes nothing on a CPU: the saved tensors are in host memory already.")

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.budget is None or self.plan is not None:
            return
        self.plan = plan_for_batch(trainer, pl_module, batch, batch_idx, self.budget, list(self.modules))
        rank_zero_info(f"ActivationCheckpointing(budget={self.budget!r}): {self.plan.describe()}")
        if self.plan.paths:
            self._paths = checkpoint_modules(pl_module, self.plan.paths)

    def _checkpoint(self, model: nn.Module) -> tuple[str, ...]:
        return checkpoint_modules(
            model, self.modules, policy=self.policy, every=self.every, keep=self.keep, min_bytes=self.min_bytes
        )

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._undo(pl_module)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._undo(pl_module)

    def _undo(self, pl_module: pl.LightningModule) -> None:
        moved = [path for path, module in pl_module.named_modules() if module in self._taken]
        uncheckpoint_modules(pl_module, [*self._paths, *moved])
        self._paths, self._taken = (), set()

"""The first training batch of a fit, run on trial to find which modules keep a memory budget.

What it does: calls ``training_step`` and the backward on the batch in progress as often as the plan asks for, and puts
back what they change besides buffers, gradients and random state, which the plan itself restores: what is logged is
dropped, and parameters, metrics, attributes of the modules, and the batch are as before.
What it costs: the steps of the plan, once per fit, and a copy of the weights on the host meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_speedkit.measure.kept_state import KeptState
from lightning_speedkit.measure.sync_batch_norm import holds_sync_batch_norm
from lightning_speedkit.memory.checkpoint_budget import CheckpointPlan, plan_checkpoints

__all__ = ["plan_for_batch", "refuse_budget"]

_RESTORED = ("_buffers", "_modules")  # by the plan itself


def refuse_budget(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Raises if a batch of this fit cannot be run on trial without harm."""
    reason = None
    if not module.automatic_optimization:
        reason = "manual optimization, in which training_step itself takes the steps"
    elif isinstance(trainer.strategy, ModelParallelStrategy):
        reason = "ModelParallelStrategy: trial steps exchange shards, and the ranks may take different numbers of them"
    elif getattr(trainer.strategy.model, "static_graph", False):
        reason = "a static graph of DDP, which counts every backward; use static_graph=False"
    elif trainer.world_size > 1 and holds_sync_batch_norm(module):
        reason = "SyncBatchNorm: trial steps exchange statistics, and the ranks may take different numbers of them"
    elif is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        reason = "training_step(dataloader_iter), which takes its batches itself"
    if reason is not None:
        raise MisconfigurationException(f"ActivationCheckpointing(budget=...) does not go with {reason}.")


def plan_for_batch(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    batch: Any,
    batch_idx: int,
    budget: str | float,
    modules: str | list[str],
) -> CheckpointPlan:
    """The plan for the batch in progress; on several ranks each has its own, and all raise if one of them fails."""
    failure: Exception | None = None
    plan: CheckpointPlan | None = None
    sync = trainer.strategy.block_backward_sync() if isinstance(trainer.strategy, DDPStrategy) else nullcontext()
    try:
        with _untouched(module), sync:
            plan = plan_checkpoints(module, _run_of(trainer, module, batch, batch_idx), budget, modules)
    except Exception as error:  # told after the other ranks know
        failure = error
    everywhere = trainer.strategy.reduce_boolean_decision(failure is None)
    if failure is not None:
        raise failure
    if plan is None or not everywhere:
        raise RuntimeError(f"budget={budget!r}: no plan was found on another rank, whose error says why.")
    return plan


def _run_of(trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> Callable[[], None]:
    leaves, structure = tree_flatten(batch)
    overwritten = [(leaf, leaf._version, leaf.detach().clone()) for leaf in leaves if isinstance(leaf, Tensor)]
    with_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)

    def run() -> None:
        fresh = tree_unflatten(leaves, structure)  # a step may take things out of a dict
        with trainer.precision_plugin.train_step_context():
            output = module.training_step(*((fresh, batch_idx) if with_index else (fresh,)))
        loss = output.get("loss") if isinstance(output, dict) else output
        if not isinstance(loss, Tensor):
            raise MisconfigurationException(
                f"budget: training_step gave no loss for the first batch of the fit, but {loss!r}, so that its memory "
                f"cannot be measured. Return a loss, or name the modules to checkpoint instead of a budget."
            )
        module.backward(loss)
        with torch.no_grad():
            for leaf, version, value in overwritten:
                if leaf._version != version:
                    leaf.copy_(value)

    return run


@contextmanager
def _untouched(module: pl.LightningModule) -> Iterator[None]:
    kept = KeptState()
    for inner in module.modules():
        kept.attributes(inner, skip=_RESTORED)  # parameters too: a step may average them into a second network
    vars(module).update(dict.fromkeys(("log", "log_dict"), lambda *_, **__: None))
    try:
        yield
    finally:
        kept.finish()

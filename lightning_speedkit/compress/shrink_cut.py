"""Cuts a module as a plan says, and lets everything that knows its sizes follow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_speedkit.compress.shrink_plan import ShrinkPlan
from lightning_speedkit.compress.shrink_resize import follow_checkpoints, original_sizes, set_original_sizes
from lightning_speedkit.compress.shrink_sizes import cut, forget_gradient_sink, tensor_sizes
from lightning_speedkit.measure.lightning_internals import forget_static_graph_flush

__all__ = ["apply_plan", "given_gradients", "gradients_of", "wrap_again"]


def apply_plan(model: nn.Module, plan: ShrinkPlan, optimizers: Iterable[Optimizer] = ()) -> None:
    """Cuts ``model`` as ``plan`` says, and keeps in it which sizes it had."""
    sizes, before = tensor_sizes(model), original_sizes(model)
    cut(model, plan.cuts, optimizers)
    set_original_sizes(model, {**{name: sizes[name] for name in plan.cuts}, **before})
    if isinstance(model, pl.LightningModule) and plan.cuts:
        follow_checkpoints(model)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """The gradients that the parameters of ``model`` hold."""
    return {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None}


def given_gradients(held: Mapping[str, Tensor] | None, criterion: str) -> Mapping[str, Tensor] | None:
    """The gradients that ``"taylor"`` needs, on the CPU; an error if there are none."""
    if criterion != "taylor":
        return None
    if not held:
        raise MisconfigurationException(
            "criterion='taylor' needs gradients, and no parameter has one: run a backward pass first "
            "(StructuredPruning: start_epoch=1 or later)."
        )
    return {name: gradient.float().cpu() for name, gradient in held.items()}


def wrap_again(trainer: pl.Trainer) -> None:
    """Under DDP, gives the strategy a new wrapper around the module, whose buckets have the sizes of now."""
    strategy = trainer.strategy
    if isinstance(strategy, DDPStrategy):
        strategy.model = trainer.lightning_module
        for parameter in trainer.lightning_module.parameters():
            forget_gradient_sink(parameter)
        strategy.configure_ddp()
        forget_static_graph_flush(strategy)

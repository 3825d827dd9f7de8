"""Finds where a number that is not finite came from: the batch, the weights, or the first module that made one.

What it does: it runs the forward pass of the batch again, on a copy that shares the weights, and looks at what each
module returns. When it helps: once, after the fact; a hook on every module in every batch would cost far more than
the guard. What it costs: one forward pass, on one device, and a copy of everything of the module but its parameters.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_speedkit.measure.samples import tensors_in

__all__ = ["explain_non_finite", "first_non_finite_module"]


def first_non_finite_module(module: nn.Module, run: Callable[[], Any]) -> str | None:
    """Name the first submodule, in the order in which they return, whose output is not finite while ``run()`` runs.

    ``None`` if every module returned finite numbers. What ``run`` raises after a module was found is swallowed.

    >>> class Log(nn.Module):
    ...     def forward(self, x):
    ...         return x.log()
    >>> net = nn.Sequential(nn.Identity(), Log(), nn.Identity())
    >>> first_non_finite_module(net, lambda: net(torch.zeros(2)))
    "module '1' (Log) returned it"
    """
    found: list[str] = []

    def look(name: str) -> Callable[..., None]:
        def hook(child: nn.Module, inputs: Any, output: Any) -> None:
            if not found and not _all_finite(tensors_in(output)):
                came = _all_finite(tensors_in(inputs))
                what = f"module {name!r} ({type(child).__name__})"
                found.append(f"{what} returned it" if came else f"it went into {what}, computed outside of modules")

        return hook

    handles = [child.register_forward_hook(look(name)) for name, child in module.named_modules() if name]
    try:
        run()
    except Exception:
        if not found:
            raise
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def explain_non_finite(trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> str | None:
    """Say in a few words where a non-finite gradient came from, or ``None`` if that cannot be told.

    Leaves the module, its buffers and metrics, what was logged, and the random state as they are. A module that cannot
    be copied, or whose ``training_step`` needs its Trainer, is not run again, and none is with several ranks, where
    ``training_step`` may wait for the others; then the gradients have to tell.
    """
    if not _all_finite(tensors_in(batch)):
        return "it is in the batch"
    for name, parameter in pl_module.named_parameters():
        if not _all_finite([parameter]):
            return f"it is in the weights of {name!r} already"
    if trainer.world_size == 1:
        try:
            found = _replay(trainer, pl_module, batch, batch_idx)
        except Exception:  # the user's code, on a copy without a Trainer: anything can happen
            found = None
        if found is not None:
            return found
    bad = [name for name, p in pl_module.named_parameters() if p.grad is not None and not _all_finite([p.grad])]
    if not bad:
        return None
    or_before = ", or an earlier micro-batch of its window," if trainer.accumulate_grad_batches > 1 else ""
    where = "the backward pass" if trainer.world_size == 1 else "the forward or backward pass"
    on_one = "" if trainer.world_size == 1 else " (on one device, the module would be named)"
    return f"{where}{or_before} made it; the last parameter with such a gradient is {bad[-1]!r}{on_one}"


def _replay(trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> str | None:
    twin = copy.deepcopy(pl_module, {id(p): p for p in pl_module.parameters()})
    losses: list[Any] = []
    device = pl_module.device
    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        warnings.catch_warnings(),  # a copy has no Trainer to log to, and says so
        trainer.precision_plugin.train_step_context(),
    ):
        warnings.simplefilter("ignore")
        found = first_non_finite_module(twin, lambda: losses.append(twin.training_step(batch, batch_idx)))
    if found is None and not _all_finite(tensors_in(losses)):
        return "training_step made it of finite outputs of modules"
    return found


def _all_finite(tensors: Iterable[Tensor]) -> bool:
    local = (t.to_local() if hasattr(t, "to_local") else t for t in tensors)  # else each rank had to ask for the same
    return all(bool(t.detach().isfinite().all()) for t in local if t.is_floating_point() or t.is_complex())

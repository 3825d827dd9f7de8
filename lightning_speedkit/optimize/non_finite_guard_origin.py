"""Finds where a number that is not finite came from: the batch, the weights, or the first module that made one.

What it does: it runs the forward pass of the batch again, on a copy that shares the weights, and looks at what each
module returns. When it helps: once, after the fact; a hook on every module in every batch would cost far more than
the guard. What it costs: one forward pass, on one device, and a copy of everything of the module but its parameters.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

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
    be copied (sharded by FSDP2, say), or whose ``training_step`` needs its Trainer, is not run again; then the
    gradients have to tell.

    With several ranks each looks for itself and waits for no other: a ``training_step`` that communicates is not run
    to its end. The rank that has it names itself. Rank 0 says what it can where it has no part in it; others get
    ``None`` then.
    """
    several, rank = trainer.world_size > 1, trainer.global_rank
    found = _first_seen(trainer, pl_module, batch, batch_idx)
    if found is not None and found != "":
        return f"on rank {rank}, {found}" if several else found
    bad = [name for name, p in pl_module.named_parameters() if p.grad is not None and not _all_finite([p.grad])]
    if not bad or (several and rank != 0):
        return None
    or_before = ", or an earlier micro-batch of its window," if trainer.accumulate_grad_batches > 1 else ""
    where = "the backward pass" if found == "" or not several else "the forward or backward pass"
    if several:
        where = f"another rank, which then names itself, or {where}" if found == "" else f"{where} of some rank"
    return f"{where}{or_before} made it; the last parameter with such a gradient is {bad[-1]!r}"


def _first_seen(trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> str | None:
    """Where this rank finds it before the backward pass. Empty: all is finite there. ``None``: that is not known."""
    if not _all_finite(tensors_in(batch)):
        return "it is in the batch"
    for name, parameter in pl_module.named_parameters():
        if not _all_finite([parameter]):
            return f"it is in the weights of {name!r} already"
    try:
        return _replay(trainer, pl_module, batch, batch_idx)
    except Exception:  # the user's code, on a copy without a Trainer: anything can happen
        return None


def _replay(trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> str:
    twin = copy.deepcopy(pl_module, {id(p): p for p in pl_module.parameters()})
    losses: list[Any] = []
    device = pl_module.device
    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        warnings.catch_warnings(),  # a copy has no Trainer to log to, and says so
        trainer.precision_plugin.train_step_context(),
        _Alone() if trainer.world_size > 1 else contextlib.nullcontext(),  # type: ignore[no-untyped-call]
    ):
        warnings.simplefilter("ignore")
        found = first_non_finite_module(twin, lambda: losses.append(twin.training_step(batch, batch_idx)))
    if found is None and not _all_finite(tensors_in(losses)):
        return "training_step made it of finite outputs of modules"
    return found or ""


class _Alone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises instead of communicating: a rank that ran this alone would wait for the others without end."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise RuntimeError("This is run on one rank alone.")
        return func(*args, **(kwargs or {}))


def _all_finite(tensors: Iterable[Tensor]) -> bool:
    local = (t.to_local() if hasattr(t, "to_local") else t for t in tensors)  # else each rank had to ask for the same
    return all(bool(t.detach().isfinite().all()) for t in local if t.is_floating_point() or t.is_complex())

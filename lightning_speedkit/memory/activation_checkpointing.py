"""Activation checkpointing: blocks keep their inputs only, and compute their insides again in the backward pass.

What it does: each chosen block runs through ``torch.utils.checkpoint`` while it trains. The result is the same bit for
bit: the recomputation draws the same random numbers (of torch, ``random`` and ``numpy.random``), autocast is the same,
and buffers (the statistics of BatchNorm, the vectors of spectral norm, any counter in a buffer) advance once per batch.
The names of parameters, the keys of the ``state_dict``, ``isinstance`` and the printed model do not change; a copy or
a pickle of the model is the plain model.

When it helps: the activations, not the weights, fill the memory; deep models, long sequences, large images.
What it costs: one more forward of those blocks, in theory a third of the step when everything is checkpointed.

Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016; pytorch#96136 (BatchNorm advances twice under
plain checkpointing); asked of Lightning since #49 and #1308.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torchmetrics import Metric
from typing_extensions import override

from lightning_speedkit.memory.block_selection import checked_selection, select_modules
from lightning_speedkit.memory.recomputation import Recomputed, plain_class, recomputed_class

__all__ = ["ActivationCheckpointing", "checkpoint_modules", "uncheckpoint_modules"]


def checkpoint_modules(model: nn.Module, modules: str | Sequence[str] = "auto") -> tuple[str, ...]:
    """Makes the chosen modules recompute their activations, in place, and returns the paths of those it changed.

    A module inside a chosen one is left out, with a warning; one that is checkpointed already stays so and is not
    returned. If this raises, nothing has changed. In eval mode and under ``torch.no_grad`` the modules run as before.

    Args:
        model: The model that holds them; it may be on any device and in any mode.
        modules: ``"auto"`` (the repeated blocks), or one or more class names, paths, or globs of paths such as
            ``"encoder.layers.*"``.

    Raises:
        ValueError: If a name means nothing in the model, or a chosen module cannot be recomputed exactly.
        TypeError: If ``modules`` is neither a string nor a list of strings.

    >>> block = lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.5))
    >>> model = nn.Sequential(block(), block(), nn.Linear(4, 1))
    >>> checkpoint_modules(model)
    ('0', '1')
    >>> model(torch.ones(2, 4)).sum().backward()  # the same loss and gradients, with less memory in between
    >>> uncheckpoint_modules(model)
    ('0', '1')
    """
    selected = select_modules(model, modules)
    taken = [path for path, module in model.named_modules() if isinstance(module, Recomputed)]
    chosen = [path for path in selected if not any(path.startswith(f"{outer}.") for outer in (*selected, *taken))]
    for path in chosen:
        _refuse_what_cannot_be_recomputed(path, model.get_submodule(path))
    new = [path for path in chosen if path not in taken]
    if len(chosen) < len(selected) and (new or not chosen):
        inner = [path for path in selected if path not in chosen]
        rank_zero_warn(
            f"{len(inner)} of the chosen modules lie inside others that are checkpointed, {inner[0]!r} for one; "
            f"they would be computed three times. Only the outermost are checkpointed."
        )
    if new:
        _warn_of_what_happens_twice(model, new)
    return _set_classes(model, new)


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


def _set_classes(model: nn.Module, paths: Sequence[str]) -> tuple[str, ...]:
    for path in paths:
        module = model.get_submodule(path)
        try:
            module.__class__ = recomputed_class(type(module))
        except TypeError as error:  # a class with __slots__, or one that cannot be subclassed
            uncheckpoint_modules(model, paths)
            raise ValueError(
                f"modules: {path!r} cannot be checkpointed, because its class {type(module).__name__} cannot be "
                f"exchanged: {error}. Choose a module inside or around it."
            ) from error
    return tuple(paths)


def _refuse_what_cannot_be_recomputed(path: str, module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(f"modules: {path!r} is a TorchScript module, which cannot be checkpointed.")
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        raise ValueError(
            f"modules: {path!r} is lazy: it changes its own class when it makes its parameters, in the first forward. "
            f"Run a batch through the model before, or choose the module around it."
        )
    if "forward" in vars(module):
        raise ValueError(
            f"modules: {path!r} has a forward of its own set on the instance, so that its class has no say. "
            f"Remove that patch, or choose another module."
        )
    if _holds_sync_batch_norm(module):
        raise ValueError(_SYNC_BATCH_NORM.format(path=path))


def _warn_of_what_happens_twice(model: nn.Module, paths: Sequence[str]) -> None:
    metrics = [
        f"{path}.{name}".rstrip(".")
        for path in paths
        for name, module in model.get_submodule(path).named_modules()
        if isinstance(module, Metric)
    ]
    if metrics:
        rank_zero_warn(
            f"{metrics[0]!r} is a metric inside a checkpointed module: if the forward updates it, "
            f"every batch counts twice. Update it outside."
        )
    for path, module in model.named_modules():
        # torch's own wrapper, and the switch that Hugging Face's models have
        if type(module).__name__ == "CheckpointWrapper" or getattr(module, "gradient_checkpointing", None) is True:
            rank_zero_warn(
                f"{path or 'the model'!r} brings checkpointing of its own, which is switched on: "
                f"what both cover is computed three times. Switch one of them off."
            )
            return


def _holds_sync_batch_norm(module: nn.Module) -> bool:
    return any(isinstance(inner, nn.SyncBatchNorm) for inner in module.modules())


_SYNC_BATCH_NORM = (
    "modules: {path!r} holds a SyncBatchNorm. Computing it again would exchange statistics between the ranks once "
    "more, amid the all-reduce of the gradients, which can hang (pytorch#43946). "
    "Use BatchNorm and sync_batchnorm=False, or choose modules without it."
)


class ActivationCheckpointing(Callback):
    """Trains with activation checkpointing of the chosen modules; after the fit everything is as it was.

    Args:
        modules: ``"auto"`` for the repeated blocks of the model (transformer blocks, residual blocks), or a class
            name (``"Block"``), the path of a module (``"encoder.layers.3"``), a glob of paths in which ``*`` stands
            for one name (``"encoder.layers.*"``), or a list of these.

    Raises:
        ValueError: At the start of the fit, if a name means nothing in the model; the message says what is there.
        MisconfigurationException: If the strategy shards the model, or makes SyncBatchNorm of the chosen modules.

    >>> ActivationCheckpointing(["Block", "decoder.layers.*"]).modules
    ('Block', 'decoder.layers.*')
    """

    def __init__(self, modules: str | list[str] = "auto") -> None:
        self.modules = checked_selection(modules)
        self._paths: tuple[str, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the modules that this callback has checkpointed; empty outside a fit."""
        return self._paths

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if isinstance(trainer.strategy, (FSDPStrategy, DeepSpeedStrategy, ModelParallelStrategy)):
            raise MisconfigurationException(
                f"ActivationCheckpointing does not go with {type(trainer.strategy).__name__}, which shards the model. "
                f"Use FSDPStrategy(activation_checkpointing_policy=...) or DeepSpeed's own checkpointing, or call "
                f"checkpoint_modules(self, ...) in configure_model, before fully_shard."
            )
        # What is there already is taken now: BatchSizeFinder tries its sizes before our on_fit_start.
        with suppress(ValueError):
            self._paths = checkpoint_modules(pl_module, self.modules)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # The module's own setup and configure_model come after our setup, and so does sync_batchnorm=True.
        for path, module in pl_module.named_modules():
            if path in self._paths and _holds_sync_batch_norm(module):
                raise MisconfigurationException(_SYNC_BATCH_NORM.format(path=path))
        new = checkpoint_modules(pl_module, self.modules)
        self._paths = tuple(dict.fromkeys(self._paths + new))

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._undo(pl_module)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._undo(pl_module)

    def _undo(self, pl_module: pl.LightningModule) -> None:
        uncheckpoint_modules(pl_module, self._paths)
        self._paths = ()

"""What is refused before modules are checkpointed, and what is told: who cannot be recomputed exactly, and why."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torchmetrics import Metric

from lightning_speedkit.memory.recomputation import Recomputed

__all__ = [
    "SYNC_BATCH_NORM",
    "checked_every",
    "refuse_nested",
    "refuse_what_cannot_be_exchanged",
    "warn_of_what_happens_twice",
]


def checked_every(every: int) -> int:
    """The number itself, or what is wrong with it."""
    if isinstance(every, bool) or not isinstance(every, int):
        raise TypeError(f"every is a whole number, got {every!r}.")
    if every < 1:
        raise ValueError(f"every={every} must be 1 (all of the chosen modules) or more.")
    return every


def refuse_nested(model: nn.Module, chosen: Sequence[str]) -> None:
    """Raises if one of the chosen modules lies inside another, or inside or around one that is checkpointed."""
    taken = [path for path, module in model.named_modules() if isinstance(module, Recomputed)]
    for outer in (*chosen, *taken):
        for path in (*chosen, *taken):
            if path.startswith(f"{outer}.") and not (outer in taken and path in taken):
                raise ValueError(
                    f"modules: {path!r} lies inside {outer!r}, and both would be checkpointed: what is inside would be "
                    f"computed three times. Choose one of them; a glob such as 'layers.*' names one level only."
                    + (f" Is checkpointed already: {path if path in taken else outer!r}." if taken else "")
                )


def refuse_what_cannot_be_exchanged(path: str, module: nn.Module) -> None:
    """Raises if another forward in the module's class would do nothing, or too much."""
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
    if _is_torch_wrapper(module) or path.rpartition(".")[2] == "_checkpoint_wrapped_module":
        raise ValueError(
            f"modules: {path!r} is checkpointed already, by torch's checkpoint_wrapper; what is inside would be "
            f"computed three times. Remove that wrapper, or choose other modules."
        )


def warn_of_what_happens_twice(model: nn.Module, paths: Sequence[str]) -> None:
    """Names a metric inside the modules, and checkpointing that the model brings itself."""
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
        if _is_torch_wrapper(module) or getattr(module, "gradient_checkpointing", None) is True:
            rank_zero_warn(
                f"{path or 'the model'!r} brings checkpointing of its own, which is switched on: "
                f"what both cover is computed three times. Switch one of them off."
            )
            return


def _is_torch_wrapper(module: nn.Module) -> bool:
    return type(module).__name__ == "CheckpointWrapper"


SYNC_BATCH_NORM = (
    "modules: {path!r} holds a SyncBatchNorm. Computing it again would exchange statistics between the ranks once "
    "more, amid the all-reduce of the gradients, which can hang (pytorch#43946). "
    "Use BatchNorm and sync_batchnorm=False, or choose modules without it."
)

"""The gradients of an unfinished accumulation window, as they are kept in a checkpoint.

What it does: a checkpoint taken inside a window holds the gradients so far, and a run resumed from it goes on with
them; in Lightning they are lost without a word. Ranks have different gradients there, and only one of them writes the
file: it gets their weighted mean, which is all that the step needs, since it is linear in them. What it costs: while
such a checkpoint is saved, one synchronisation of the gradients, and one copy of them in the file. Nothing between
windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_speedkit.optimize.accumulation_ranks import DataRanks
from lightning_speedkit.optimize.accumulation_window import AccumulationWindow

__all__ = ["restore_window", "window_state"]


def window_state(
    named_parameters: Iterable[tuple[str, nn.Parameter]], window: AccumulationWindow, ranks: DataRanks
) -> dict[str, Any]:
    """The window and its gradients as tensors and plain numbers; to be called on all ranks.

    Returns:
        ``gradients`` by name on the CPU, empty on ranks other than 0, and the numbers of the window over all ranks.
    """
    parameters = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    reference = float(window.reference)
    common = ranks.largest(reference)
    share = reference / common if common else 1.0
    held = ranks.any_holds([parameter.grad is not None for _, parameter in parameters])
    gradients: dict[str, Tensor] = {}
    for (name, parameter), is_held in zip(parameters, held, strict=True):
        if not is_held:
            continue
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
        if isinstance(gradient, DTensor):
            whole = gradient.full_tensor()  # a mean over the ranks already: a sharded backward averages at once
        else:
            whole = ranks.mean(gradient * share) if ranks.size > 1 else gradient
        if ranks.rank == 0:
            gradients[name] = whole.cpu().clone()
    return {
        "gradients": gradients,
        "samples": int(ranks.total(window.samples)),
        "batches": window.batches,
        "reference": common,
        "divided_by": window.divided_by,
        "ranks": ranks.size,
    }


def restore_window(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    state: Mapping[str, Any],
    ranks: DataRanks,
    loss_scale_ratio: float = 1.0,
) -> AccumulationWindow:
    """Give the parameters the gradients of :func:`window_state`, and return the window.

    Args:
        named_parameters: Those of a module whose gradients are cleared.
        state: What was saved.
        ranks: The ranks of this run.
        loss_scale_ratio: The scale of the losses now, relative to that at the time of the checkpoint.

    Raises:
        MisconfigurationException: The run has another number of ranks, or its module other parameters.
    """
    if state["ranks"] != ranks.size:
        raise MisconfigurationException(
            f"The checkpoint was saved inside an accumulation window on {state['ranks']} rank(s), and this run has "
            f"{ranks.size}: the rest of the window would be another one. Resume it on {state['ranks']} rank(s), or "
            "from a checkpoint that was saved between two windows, such as one of the end of an epoch."
        )
    parameters = dict(named_parameters)
    unknown = [name for name in state["gradients"] if name not in parameters]
    if unknown:
        raise MisconfigurationException(
            f"The checkpoint was saved inside an accumulation window and has gradients of {', '.join(unknown[:3])}, "
            f"which this module does not have. Resume with the module that was saved, or from a checkpoint that was "
            "saved between two windows."
        )
    for name, saved in state["gradients"].items():
        parameter = parameters[name]
        gradient = saved.to(parameter.device, parameter.dtype, copy=True)
        if loss_scale_ratio != 1.0:
            gradient *= loss_scale_ratio
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        parameter.grad = gradient
    window = AccumulationWindow(divided_by=state["divided_by"], reference=state["reference"])
    window.samples = state["samples"] if ranks.rank == 0 else 0
    window.batches = state["batches"]
    return window

"""Names the parameters that a loss does not depend on, where DDP would say their numbers or nothing.

DDP waits for the gradient of each parameter. One that never comes is told in the next step, by its index; in the last
step of a run it is not told at all, and gradients that share its bucket are not averaged.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

__all__ = ["name_unused", "unused_message", "without_gradient"]

_MOST = 10
_INDICES = re.compile(r"Parameter indices which did not receive grad for rank \d+:((?: \d+)+)")


def without_gradient(module: nn.Module) -> list[str]:
    """The names of the parameters to train that have no gradient.

    >>> without_gradient(nn.Linear(2, 1))
    ['weight', 'bias']
    """
    return [name for name, p in _sent(module) if p.grad is None]


def name_unused(module: nn.Module, error: str) -> list[str]:
    """The names of the parameters whose indices torch's error tells, if it is the one about unused parameters.

    >>> name_unused(nn.Linear(2, 1), "... Parameter indices which did not receive grad for rank 0: 1 ...")
    ['bias']
    """
    found = _INDICES.search(error)
    names = [name for name, _ in _sent(module)]
    indices = [int(text) for text in found.group(1).split()] if found else []
    return [names[index] for index in indices if index < len(names)]


def unused_message(names: Sequence[str]) -> str:
    """What is wrong, and the ways out."""
    shown = ", ".join(names[:_MOST]) + (f" and {len(names) - _MOST} more" if len(names) > _MOST else "")
    return (
        f"The loss does not depend on these parameters: {shown}. DDP waits for their gradients, and would not average "
        "others that are sent with them. Freeze them (requires_grad=False) or remove them; or, if a step may leave "
        "them out, use SpeedkitDDPStrategy(find_unused_parameters=True), or strategy='speedkit_ddp_static' if all "
        "steps leave out the same ones."
    )


def _sent(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))  # as DDP itself asks
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad and name not in ignored]

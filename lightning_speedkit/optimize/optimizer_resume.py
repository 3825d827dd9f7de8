"""Whether the optimizer of a checkpoint is the one of the run that goes on from it.

When it helps: torch finds out later, and speaks of the sizes of parameter groups; or not at all, and the first step
fails. What it costs: a look at the checkpoint when a run is resumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer

__all__ = ["check_groups", "check_name", "saved_groups"]

_KINDS = ("betas", "momentum", "beta2_decay", "muon", "warmup_steps", "block_size")
_START_ANEW = (
    "To go on from the weights alone with a new optimizer, load them by load_from_checkpoint, and call fit without "
    "ckpt_path."
)

Group = tuple[int, frozenset[str]]
"""Of a parameter group: how many parameters it has, and the settings that tell one kind of optimizer from another."""


def check_name(saved: str | None, here: str | None) -> None:
    """Raise if the checkpoint and the run chose optimizers, and not the same one.

    Args:
        saved: The name that the checkpoint was saved with; ``None``: there was no choice.
        here: The name that the run has.

    Raises:
        MisconfigurationException: They differ; the message names the ways out.

    >>> check_name("muon", "muon")
    """
    if saved is not None and saved != here:
        now = "has no OptimizerChoice" if here is None else f"has OptimizerChoice({here!r})"
        raise MisconfigurationException(
            f"The checkpoint was saved with OptimizerChoice({saved!r}), and this run {now}: the state of one optimizer "
            f"is none for another. Resume with OptimizerChoice({saved!r}). {_START_ANEW}"
        )


def saved_groups(checkpoint: Mapping[str, Any]) -> list[Group] | None:
    """The groups of the one optimizer in a checkpoint; ``None`` if it has none, or several."""
    states = checkpoint.get("optimizer_states", ())
    if len(states) != 1 or "param_groups" not in states[0]:
        return None
    return _described(states[0]["param_groups"])


def check_groups(saved: Sequence[Group], optimizer: Optimizer, name: str) -> None:
    """Raise if the optimizer cannot go on from a state with these groups.

    Raises:
        MisconfigurationException: It cannot; the message names the ways out.

    >>> import torch
    >>> optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])
    >>> check_groups([(1, frozenset({"betas"}))], optimizer, "adam")
    """
    if _described(optimizer.param_groups) != list(saved):
        raise MisconfigurationException(
            f"The checkpoint has the state of another optimizer than OptimizerChoice({name!r}) makes: the groups of "
            "parameters or their settings differ. Resume with the callbacks and the settings that it was saved with "
            f"(without OptimizerChoice, if there was none). {_START_ANEW}"
        )


def _described(groups: Sequence[Mapping[str, Any]]) -> list[Group]:
    return [(len(group["params"]), frozenset(group.keys() & set(_KINDS))) for group in groups]

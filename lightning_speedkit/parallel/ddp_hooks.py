"""What the gradients are sent as under DDP: whole, in 16 bits, or as thin matrices.

Each is a communication hook of torch's ``DistributedDataParallel``. Lightning registers one on CUDA only and passes it
over in silence elsewhere; here it is registered, or refused with the reason.

When it helps: sending the gradients takes longer than the backward that hides it. What it costs: precision of the
gradients. On one machine, or with a fast link, it gains nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from lightning_speedkit.parallel.power_sgd import PowerSGD, power_sgd_hook

__all__ = ["CommHook", "check_comm_hook", "register_comm_hook"]

CommHook = Literal["fp16", "bf16", "powersgd"]
_HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def register_comm_hook(model: DistributedDataParallel, name: str, power_sgd: PowerSGD | None = None) -> None:
    """Let a wrapped model send fewer bytes. All ranks have to call it.

    Args:
        model: The model, wrapped and not yet trained.
        name: ``"fp16"``: half of the bytes; a gradient above 65504 becomes infinite. ``"bf16"``: the same with the
            range of float32 and fewer digits. ``"powersgd"``: thin matrices, see :class:`PowerSGD`.
        power_sgd: What ``"powersgd"`` remembers; a new :class:`PowerSGD` if there is none.

    Raises:
        ValueError: The name is unknown, or ``power_sgd`` is given to another hook.
        MisconfigurationException: The backend of the model's process group cannot do it.
    """
    check_comm_hook(name)
    if power_sgd is not None and name != "powersgd":
        raise ValueError(f"power_sgd has no effect with comm_hook={name!r}; leave it out, or use 'powersgd'.")
    group = model.process_group
    if name == "powersgd":
        memory = PowerSGD() if power_sgd is None else power_sgd
        memory.follow(model.module)
        model.register_comm_hook((group, memory), power_sgd_hook)
        return
    _check_backend(model, name)
    model.register_comm_hook(group, default_hooks.fp16_compress_hook if name == "fp16" else _bf16_hook)


def check_comm_hook(name: object) -> None:
    """Raise unless there is a hook of this name.

    Raises:
        ValueError: there is none.

    >>> check_comm_hook("power_sgd")
    Traceback (most recent call last):
    ...
    ValueError: comm_hook='power_sgd' is unknown; use 'fp16', 'bf16', 'powersgd' or None. Did you mean 'powersgd'?
    """
    names = get_args(CommHook)
    if name not in names:
        near = difflib.get_close_matches(str(name).lower(), names, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"comm_hook={name!r} is unknown; use {', '.join(map(repr, names))} or None.{hint}")


def _bf16_hook(group, bucket):  # type: ignore[no-untyped-def]  # torch refuses other annotations than its own
    # torch refuses its hook by name unless there is NCCL; gloo can do it too
    return default_hooks.bf16_compress_hook(group, bucket)


def _check_backend(model: DistributedDataParallel, name: str) -> None:
    """Send one number, which is the only answer that holds for each backend and version."""
    number = torch.ones(1, dtype=_HALVES[name], device=next(model.parameters()).device)
    all_reduce: Callable[..., Any] = torch.distributed.all_reduce
    try:
        all_reduce(number, group=model.process_group)
    except RuntimeError as error:
        backend = torch.distributed.get_backend(model.process_group)
        raise MisconfigurationException(
            f"comm_hook={name!r} does not work on the {backend!r} backend here, which cannot add up "
            f"{_HALVES[name]}: {error}. Use another hook, none, or process_group_backend='gloo' or 'nccl'."
        ) from error

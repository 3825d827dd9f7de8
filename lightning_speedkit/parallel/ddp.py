"""Data parallel training that accumulates on a static graph and tells you what it cannot do.

What it does: it is Lightning's ``DDPStrategy`` with three differences. A static graph works together with gradient
accumulation; in Lightning that fails inside torch (Lightning #19354), because torch learns the graph in the first
backward and needs to synchronise there. A communication hook is registered on every device; Lightning passes it over
in silence unless the device is CUDA. Gradients are views into the buckets that are sent, so they are held once and
not twice.

When it helps: more than one device, and a model that fits on each. A static graph, if each step uses the same
parameters in the same order: then torch finds unused parameters once instead of in each step. What it costs: one
synchronisation more in a run with a static graph and accumulation; precision of the gradients with a hook.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from numbers import Real
from typing import Any, Literal, get_args

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_speedkit.measure.lightning_internals import forget_static_graph_flush

__all__ = ["SpeedkitDDPStrategy", "checked_timeout", "register_comm_hook"]

CommHook = Literal["fp16", "bf16"]
StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


def register_comm_hook(model: DistributedDataParallel, name: str) -> None:
    """Let a wrapped model send its gradients in half precision.

    Args:
        model: The model, wrapped and not yet trained.
        name: ``"fp16"``: halves what is sent, on any backend; a gradient above 65504 becomes infinite. ``"bf16"``: the
            same with the range of float32 and fewer digits; needs NCCL or XCCL.

    Raises:
        ValueError: The name is unknown.
        MisconfigurationException: The backend of the model's process group cannot do it.
    """
    _checked_hook(name)
    backend = torch.distributed.get_backend(model.process_group)
    hook: Callable[..., Any]
    hook = default_hooks.bf16_compress_hook if name == "bf16" else default_hooks.fp16_compress_hook
    refusal = (
        f"comm_hook={name!r} does not work on the {backend!r} backend here: it needs NCCL 2.10 or newer, or XCCL. "
        "Use comm_hook='fp16', or no hook."
    )
    if name == "bf16" and backend in ("gloo", "mpi"):
        raise MisconfigurationException(refusal)
    try:
        model.register_comm_hook(model.process_group, hook)
    except TypeError as error:
        raise MisconfigurationException(refusal) from error


def _checked_hook(name: str) -> None:
    if name not in get_args(CommHook):
        raise ValueError(f"comm_hook={name!r} is unknown; use {', '.join(map(repr, get_args(CommHook)))} or None.")


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r} must be a number.")


def checked_timeout(timeout_seconds: float) -> timedelta:
    """How long a collective may take, for torch.

    >>> checked_timeout(90)
    datetime.timedelta(seconds=90)
    """
    _check_number("timeout_seconds", timeout_seconds)
    # torch keeps milliseconds, and adds them to a clock of nanoseconds in 64 bits
    if not 0.001 <= timeout_seconds <= 1e9:
        raise ValueError(f"timeout_seconds={timeout_seconds!r} must be from 0.001 to 1e9.")
    return timedelta(seconds=float(timeout_seconds))


class SpeedkitDDPStrategy(DDPStrategy):
    """Distributed data parallel: one process per device, gradients averaged while the backward runs.

    By name: ``Trainer(strategy="speedkit_ddp")``, or ``"speedkit_ddp_static"`` with ``static_graph=True``.

    Args:
        static_graph: Promise that every step uses the same parameters in the same way. Parameters that no step uses
            are allowed.
        find_unused_parameters: Look in every step for parameters that the loss does not depend on.
        gradient_as_bucket_view: Let ``.grad`` be a view of what is sent, which saves one copy of all gradients. Turn
            it off for code that replaces a gradient or calls ``detach_()`` on one.
        bucket_cap_mb: MiB of gradients that are sent together, up to 1e9; ``None`` is torch's default.
        comm_hook: ``"fp16"`` or ``"bf16"`` sends the gradients in that precision; see :func:`register_comm_hook`.
        process_group_backend: ``"nccl"``, ``"gloo"``, ...; ``None`` takes the one for the device.
        timeout_seconds: How long a collective may take before the run fails: from 0.001 to 1e9 (31 years).
        start_method: How processes are started: ``"popen"``, ``"spawn"``, ``"fork"`` or ``"forkserver"``.

    Raises:
        ValueError: An argument is not allowed, or ``static_graph`` and ``find_unused_parameters`` are both set.
        TypeError: A switch is no bool, or a number no number.
        MisconfigurationException: At ``fit``: the backend cannot do what ``comm_hook`` asks for.

    Example:

        >>> from lightning.pytorch import Trainer
        >>> strategy = SpeedkitDDPStrategy(static_graph=True)
        >>> trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)
    """

    def __init__(
        self,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
        bucket_cap_mb: float | None = None,
        comm_hook: CommHook | None = None,
        process_group_backend: str | None = None,
        timeout_seconds: float = 1800.0,
        start_method: StartMethod = "popen",
    ) -> None:
        for name, switch in (
            ("static_graph", static_graph),
            ("find_unused_parameters", find_unused_parameters),
            ("gradient_as_bucket_view", gradient_as_bucket_view),
        ):
            if not isinstance(switch, bool):
                raise TypeError(f"{name}={switch!r} must be True or False.")
        if static_graph and find_unused_parameters:
            raise ValueError(
                "static_graph=True finds unused parameters once and for all, so find_unused_parameters=True would have "
                "no effect. Set one of them."
            )
        if comm_hook is not None:
            _checked_hook(comm_hook)
        timeout = checked_timeout(timeout_seconds)
        if bucket_cap_mb is not None:
            _check_number("bucket_cap_mb", bucket_cap_mb)
            if not 0 < bucket_cap_mb <= 1e9:
                raise ValueError(f"bucket_cap_mb={bucket_cap_mb!r} must be more than 0 and at most 1e9, or None.")
        if start_method not in get_args(StartMethod):
            raise ValueError(f"start_method={start_method!r} is unknown; use one of {get_args(StartMethod)}.")
        super().__init__(
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            static_graph=static_graph,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
            bucket_cap_mb=bucket_cap_mb,
        )
        self._static_graph = static_graph
        self._comm_hook = comm_hook
        self._had_backward = False

    @override
    def configure_ddp(self) -> None:
        super().configure_ddp()
        self._had_backward = False
        forget_static_graph_flush(self)
        if self._comm_hook is not None:
            assert isinstance(self.model, DistributedDataParallel)
            register_comm_hook(self.model, self._comm_hook)

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        if self._static_graph and not self._had_backward:
            yield  # torch learns the graph in the first backward, and has to synchronise there (Lightning #19354)
        else:
            with super().block_backward_sync():
                yield

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        self._had_backward = True

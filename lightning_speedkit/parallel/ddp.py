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

import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_speedkit.measure.lightning_internals import forget_static_graph_flush, set_bucket_mb
from lightning_speedkit.parallel.argument_checks import check_number, check_switch, checked_integer, checked_timeout
from lightning_speedkit.parallel.bucket_size import measure_link, suggest_bucket_mb
from lightning_speedkit.parallel.ddp_hooks import CommHook, check_comm_hook, register_comm_hook
from lightning_speedkit.parallel.host_batch_norm import sync_as_before, sync_on_host
from lightning_speedkit.parallel.power_sgd import PowerSGD
from lightning_speedkit.parallel.rank_environment import check_rank_environment, port_in_use_message
from lightning_speedkit.parallel.rank_failure import FailureRelay
from lightning_speedkit.parallel.uneven import RankFlags, even_loader, take_share
from lightning_speedkit.parallel.unused_parameters import name_unused, unused_message, without_gradient

__all__ = ["SpeedkitDDPStrategy"]

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


class SpeedkitDDPStrategy(DDPStrategy):
    """Distributed data parallel: one process per device, gradients averaged while the backward runs.

    By name: ``Trainer(strategy="speedkit_ddp")``, or ``"speedkit_ddp_static"`` with ``static_graph=True``.

    Args:
        static_graph: Promise that every step uses the same parameters in the same way. Parameters that no step uses
            are allowed.
        find_unused_parameters: Look in every step for parameters that the loss does not depend on.
        gradient_as_bucket_view: Let ``.grad`` be a view of what is sent, which saves one copy of all gradients. Turn
            it off for code that replaces a gradient or calls ``detach_()`` on one.
        bucket_cap_mb: MiB of gradients that are sent together, up to 1e9; ``None`` is torch's default; ``"auto"``
            measures the link at ``fit``, see :func:`suggest_bucket_mb`.
        comm_hook: ``"fp16"``, ``"bf16"`` or ``"powersgd"`` sends fewer bytes; see :func:`register_comm_hook`.
        powersgd_rank: How many columns ``"powersgd"`` sends of a gradient; see :class:`PowerSGD`.
        powersgd_start_step: The steps that ``"powersgd"`` sends whole before.
        uneven_inputs: Let ranks have different numbers of batches; see ``docs/methods/uneven-inputs.md``. If it is
            off, a rank with more batches waits for the others until the timeout.
        process_group_backend: ``"nccl"``, ``"gloo"``, ...; ``None`` takes the one for the device.
        timeout_seconds: How long a collective may take before the run fails: from 0.001 to 1e9 (31 years).
        start_method: How processes are started: ``"popen"``, ``"spawn"``, ``"fork"`` or ``"forkserver"``.

    Raises:
        ValueError: An argument is not allowed, or ``static_graph`` and ``find_unused_parameters`` are both set.
        TypeError: A switch is no bool, or a number no number.
        MisconfigurationException: At ``fit``: the backend cannot do what ``comm_hook`` asks for, or the loss does
            not depend on some parameters; the message names them.

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
        bucket_cap_mb: float | Literal["auto"] | None = None,
        comm_hook: CommHook | None = None,
        powersgd_rank: int = 2,
        powersgd_start_step: int = 100,
        uneven_inputs: bool = True,
        process_group_backend: str | None = None,
        timeout_seconds: float = 1800.0,
        start_method: StartMethod = "popen",
    ) -> None:
        for name, switch in (
            ("static_graph", static_graph),
            ("find_unused_parameters", find_unused_parameters),
            ("gradient_as_bucket_view", gradient_as_bucket_view),
            ("uneven_inputs", uneven_inputs),
        ):
            check_switch(name, switch)
        if static_graph and find_unused_parameters:
            raise ValueError(
                "static_graph=True finds unused parameters once and for all, so find_unused_parameters=True would have "
                "no effect. Set one of them."
            )
        if comm_hook is not None:
            check_comm_hook(comm_hook)
        power_sgd = PowerSGD(
            checked_integer("powersgd_rank", powersgd_rank, 1),
            checked_integer("powersgd_start_step", powersgd_start_step, 0),
        )
        timeout = checked_timeout(timeout_seconds)
        if isinstance(bucket_cap_mb, str) and bucket_cap_mb != "auto":
            raise ValueError(f"bucket_cap_mb={bucket_cap_mb!r} must be a number, 'auto' or None.")
        if bucket_cap_mb is not None and not isinstance(bucket_cap_mb, str):
            check_number("bucket_cap_mb", bucket_cap_mb)
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
            bucket_cap_mb=None if isinstance(bucket_cap_mb, str) else bucket_cap_mb,
        )
        self._static_graph, self._measures_bucket = static_graph, bucket_cap_mb == "auto"
        self._needs_all_gradients = not (static_graph or find_unused_parameters)
        self._comm_hook = comm_hook
        self._power_sgd = power_sgd if comm_hook == "powersgd" else None
        self._had_backward = self._sent = False  # the first backward, and the first that sends
        self._sends = True
        self._uneven_inputs = uneven_inputs
        self._flags: RankFlags | None = None
        self._relay: FailureRelay | None = None
        self._share = 1.0  # what the batch in progress counts

    @override
    def setup_environment(self) -> None:
        environment = self.cluster_environment
        if isinstance(environment, LightningEnvironment):
            check_rank_environment(os.environ, self.num_nodes * self.num_processes)
        try:
            super().setup_environment()
        except torch.distributed.DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise
            assert environment is not None
            raise MisconfigurationException(port_in_use_message(environment.main_port)) from error
        if self.world_size > 1 and self._relay is None:
            assert environment is not None
            self._relay = FailureRelay(environment.main_address)

    @override
    def model_to_device(self) -> None:
        super().model_to_device()
        if self.root_device.type == "cpu" and self.model is not None:
            sync_on_host(self.model)

    @override
    def configure_ddp(self) -> None:
        if self._measures_bucket:
            set_bucket_mb(self, self._best_bucket_mb())
        super().configure_ddp()
        self._had_backward = self._sent = False
        forget_static_graph_flush(self)
        if self._comm_hook is not None:
            assert isinstance(self.model, DistributedDataParallel)
            register_comm_hook(self.model, self._comm_hook, self._power_sgd)

    def _best_bucket_mb(self) -> float:
        assert self.model is not None
        gradients = sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)
        return suggest_bucket_mb(gradients, *measure_link(self.root_device))

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        if self._static_graph and not self._had_backward:
            yield  # torch learns the graph in the first backward, and has to synchronise there (Lightning #19354)
            return
        self._sends = False
        try:
            with super().block_backward_sync():
                yield
        finally:
            self._sends = True

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        module = self.lightning_module
        assert module is not None
        self._had_backward = True
        if self._needs_all_gradients and self._sends and module.automatic_optimization:
            # torch tells it one step later, and after the last one never
            if not self._sent or module.trainer.is_last_batch:
                unused = without_gradient(module)
                if unused:
                    raise MisconfigurationException(unused_message(unused))
            self._sent = True

    @override
    def process_dataloader(self, dataloader: object) -> object:
        module = self.lightning_module
        if not (self._uneven_inputs and module is not None and module.trainer.training and self.world_size > 1):
            return super().process_dataloader(dataloader)
        if self._flags is None:
            self._flags = RankFlags()
        return even_loader(dataloader, self._flags)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        assert self.lightning_module is not None
        self._share = take_share(self.lightning_module.trainer.train_dataloader)
        self._buffers = [] if self._share else [(b, b.clone()) for b in self.lightning_module.buffers()]

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        if self._share == 1:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        if "backward" in vars(self.precision_plugin):
            raise MisconfigurationException(
                "The ranks have different numbers of batches, and another callback weighs their losses by what they "
                "count (AccumulationScheduler does). It would count a batch that a rank only repeats. Give all ranks "
                "as many batches, or leave that callback out."
            )
        loss = super().backward(closure_loss * self._share, optimizer, *args, **kwargs)
        for buffer, before in self._buffers:
            buffer.copy_(before)  # statistics of a batch that is only repeated
        return loss

    @override
    def on_exception(self, exception: BaseException) -> None:
        module = self.lightning_module
        unused = name_unused(module, str(exception)) if module is not None else []
        if unused:
            exception.args = (f"{unused_message(unused)} torch says: {exception}",)
        else:
            super().on_exception(exception)
        told = self._relay.tell(exception) if self._relay is not None else None
        if told is not None and isinstance(exception, RuntimeError):
            exception.args = (f"{told}. Rank {self.global_rank} ended for it, with: {exception}",)

    @override
    def teardown(self) -> None:
        if self.lightning_module is not None:
            sync_as_before(self.lightning_module)
        if self._flags is not None:
            self._flags.close()
            self._flags = None
        if self._relay is not None:
            self._relay.close()
            self._relay = None
        super().teardown()

"""One training step of a pipeline: the user's step gives the first stage its input and the last stage its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from lightning_speedkit.parallel.pipeline_batch import MicroBatches, merge_logged
from lightning_speedkit.parallel.pipeline_layers import InputReached, PipelinedLayers, Stage
from lightning_speedkit.parallel.pipeline_state import gather

__all__ = ["Schedule", "ScheduledStep"]

Schedule = Literal["gpipe", "1f1b", "interleaved"]
Context = Callable[[], AbstractContextManager[Any]]
Deliver = Callable[[Mapping[nn.Parameter, Tensor], Tensor], None]

_KEPT_SCHEDULES = 4  # each keeps buffers for the shape of its micro-batches


class ScheduledStep:
    """Runs a batch through the schedule.

    Args:
        module: The user's module, with ``layers`` in the place of what was cut.
        layers: What was cut.
        stages: Those of this rank, by their number.
        count: How many stages there are.
        schedule: Which schedule runs.
        microbatches: How many parts a batch has.
        group: The ranks of the pipeline.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        layers: PipelinedLayers,
        stages: Mapping[int, Stage],
        count: int,
        schedule: Schedule,
        microbatches: int,
        group: Any,
    ) -> None:
        self._module, self._layers, self._stages, self._count = module, layers, dict(stages), count
        self._kind, self._microbatches, self._group = schedule, microbatches, group
        self._schedules: dict[Any, Any] = {}
        self._rehearsed = False
        self._losses: dict[int, Tensor] = {}
        self._logged: dict[int, dict[str, tuple[float, dict[str, Any]]]] = {}

    def run(self, batch: Any, rest: Sequence[Any], context: Context, deliver: Deliver) -> Tensor:
        """The mean loss, on all ranks; its backward hands the gradients to ``deliver`` with the loss's own gradient."""
        self._cut, self._rest, self._context = MicroBatches(batch, self._microbatches), rest, context
        self._losses, self._logged = {}, {}
        first = self._input(0)
        if not self._rehearsed:
            self._rehearse(first)
            self._rehearsed = True
        schedule = self._schedule_for(first)
        parameters = [p for p in self._layers.parameters() if p.requires_grad]
        before = [p.grad for p in parameters]
        for parameter in parameters:
            parameter.grad = None
        self._step(schedule, first)
        gradients = {p: p.grad for p in parameters if p.grad is not None}
        for parameter, old in zip(parameters, before, strict=True):
            parameter.grad = old
        loss = self._share(first.device)
        handle = torch.zeros((), device=loss.device, dtype=loss.dtype, requires_grad=True)
        handle.register_hook(lambda scale: deliver(gradients, scale))  # type: ignore[no-untyped-call]
        return loss + handle

    def _step(self, schedule: Any, first: Tensor) -> None:
        arguments: tuple[Tensor, ...] = ()
        options: dict[str, Any] = {}
        if 0 in self._stages:
            arguments = (torch.cat([first, *(self._input(i) for i in range(1, self._microbatches))]),)
        if self._count - 1 in self._stages:
            options = {"target": torch.arange(self._microbatches), "losses": []}
        schedule.step(*arguments, **options)

    def _input(self, index: int) -> Tensor:
        """What the user's step gives to the layers for a micro-batch."""
        self._layers.catches_input = True
        try:
            with _without_logging(self._module), torch.no_grad(), self._context():
                self._module.training_step(self._cut.padded(index), *self._rest)
        except InputReached as reached:
            value = reached.value
        else:
            raise MisconfigurationException("training_step does not call the pipelined layers; it has to, once.")
        finally:
            self._layers.catches_input = False
        if not isinstance(value, Tensor) or not value.ndim or len(value) != self._cut.size:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise MisconfigurationException(
                f"training_step calls the pipelined layers with {got}; it must be one tensor with one row for each of "
                f"the {self._cut.size} samples."
            )
        return value.detach()

    def _rehearse(self, first: Tensor) -> None:
        """The user's step once without gradients, on all ranks together, so that they all see what does not work."""
        sums = gather((float(first.double().sum()), tuple(first.shape)), self._group)
        if any(other != sums[0] and other[0] == other[0] for other in sums):
            raise MisconfigurationException(
                f"The stages have different batches (sum and shape of their inputs: {sums}). All ranks of a pipeline "
                "need the same: call seed_everything, use no own distributed sampler, and draw no random numbers in "
                "training_step before the pipelined layers."
            )
        self._layers.calls = 0
        with _logging_to(self._module, {}), torch.no_grad(), torch.random.fork_rng(), self._context():
            output = self._module.training_step(self._cut.padded(0), *self._rest)
        if self._layers.calls != 1:
            raise MisconfigurationException(
                f"training_step calls the pipelined layers {self._layers.calls} times; a schedule runs them once. "
                "Put both inputs into one batch, or use DDP."
            )
        _loss_of(output)

    def _schedule_for(self, first: Tensor) -> Any:
        key = tuple(first.shape), first.dtype
        if key not in self._schedules:
            while len(self._schedules) >= _KEPT_SCHEDULES:
                del self._schedules[next(iter(self._schedules))]
            parts: list[Any] = [
                PipelineStage(stage, index, self._count, first.device, group=self._group)
                for index, stage in self._stages.items()
            ]
            options: dict[str, Any] = {"loss_fn": self._loss, "scale_grads": False}
            if self._kind == "interleaved":
                self._schedules[key] = ScheduleInterleaved1F1B(parts, self._microbatches, **options)
            else:
                make = ScheduleGPipe if self._kind == "gpipe" else Schedule1F1B
                self._schedules[key] = make(parts[0], self._microbatches, **options)
        return self._schedules[key]

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The user's loss of a micro-batch, by its share of the samples."""
        if output.is_meta:  # torch asks for shapes only
            return output.sum()
        index = int(target)
        rows = self._cut.rows(index)
        if not rows:
            return output.flatten()[:0].sum()
        self._layers.answer = output[:rows]
        try:
            with _logging_to(self._module, self._logged.setdefault(index, {})), self._context():
                loss = _loss_of(self._module.training_step(self._cut.real(index), *self._rest))
        finally:
            self._layers.answer = None
        share = loss * (rows / self._cut.samples)
        self._losses[index] = share.detach()
        return share

    def _share(self, device: torch.device) -> Tensor:
        """The loss on all ranks, and what was logged with it."""
        told: list[Any] = [None]
        if self._count - 1 in self._stages:
            loss = torch.stack(list(self._losses.values())).sum().cpu()
            told = [(loss, [(self._cut.rows(i), self._logged[i]) for i in sorted(self._logged)])]
        last = dist.get_process_group_ranks(self._group)[-1]
        dist.broadcast_object_list(told, src=last, group=self._group)
        loss, logged = told[0]
        found: dict[str, list[tuple[float, int]]] = {}
        options: dict[str, dict[str, Any]] = {}
        sizes: dict[str, int] = {}
        for rows, values in logged:
            for name, (value, given) in values.items():
                size = given.get("batch_size") or rows
                found.setdefault(name, []).append((value, size))
                options.setdefault(name, given)
                sizes[name] = sizes.get(name, 0) + size
        for name, values in found.items():
            value = merge_logged(values, options[name].get("reduce_fx", "mean"))
            tensor = torch.tensor(value, device=device)
            self._module.log(name, tensor, **{**options[name], "batch_size": sizes[name]})
        return loss.to(device)  # type: ignore[no-any-return]


def _loss_of(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise MisconfigurationException(
            f"training_step returned {type(output).__name__} without a loss of one number; a pipeline cannot skip a "
            "batch. Return a tensor, or a dict with 'loss'."
        )
    return loss.reshape(())


@contextmanager
def _log_replaced(module: pl.LightningModule, log: Callable[..., None]) -> Iterator[None]:
    object.__setattr__(module, "log", log)
    try:
        yield
    finally:
        object.__delattr__(module, "log")


def _keep(found: dict[str, tuple[float, dict[str, Any]]], name: str, value: Any, args: Any, options: Any) -> None:
    if args or not isinstance(value, (int, float, Tensor)):
        raise MisconfigurationException(
            f"self.log({name!r}, ...) in training_step got a {type(value).__name__}"
            f"{' and options without their names' if args else ''}: log numbers, with options by name."
        )
    found[name] = float(value.detach() if isinstance(value, Tensor) else value), options


def _without_logging(module: pl.LightningModule) -> AbstractContextManager[None]:
    return _log_replaced(module, lambda *_, **__: None)


def _logging_to(
    module: pl.LightningModule, found: dict[str, tuple[float, dict[str, Any]]]
) -> AbstractContextManager[None]:
    return _log_replaced(module, lambda name, value, *args, **options: _keep(found, name, value, args, options))

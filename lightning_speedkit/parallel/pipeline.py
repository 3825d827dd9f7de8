"""Pipeline parallel training of an unchanged LightningModule: each process holds and trains some of its layers.

What it does: Lightning has no pipeline (Lightning #17180). This strategy cuts one ``nn.Sequential`` of the model into
stages and runs a schedule of ``torch.distributed.pipelining`` over micro-batches. The loss is that of the user's own
``training_step``, run on the last stage for each micro-batch. Gradients are those of one process on the whole batch.

When it helps: a model whose layers do not fit on one device, or whose gradients are dear to send. What it costs: a
share of ``(p - 1) / (m + p - 1)`` of the time is idle with ``p`` stages and ``m`` micro-batches; logged values and the
loss are sent to all ranks in each step.

Source: Huang et al. 2019 (GPipe); Narayanan et al. 2021 (1F1B, interleaved).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, get_args

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_speedkit.parallel.argument_checks import checked_timeout
from lightning_speedkit.parallel.pipeline_cut import check_layers, cut_points, find_chain, stages_of
from lightning_speedkit.parallel.pipeline_layers import PipelinedLayers, Stage
from lightning_speedkit.parallel.pipeline_run import Schedule, ScheduledStep
from lightning_speedkit.parallel.pipeline_state import (
    gather_optimizer_state,
    gather_tensors,
    optimizer_state_of_stage,
)

__all__ = ["PipelineStrategy"]

# of this kit
_SEE_ALL = (
    *("AutoMicroBatch", "AverageWeights", "BatchSizeSearch", "CompileModel", "Distillation", "GradientClipping"),
    *("NonFiniteGuard", "Pruning", "QuantizationAwareTraining", "QuantizeOnFitEnd", "SpikeGuard", "StructuredPruning"),
)
_PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true")


class PipelineStrategy(DDPStrategy):
    """Trains the layers of one ``nn.Sequential`` on several processes, with data parallel beside it if there are more.

    By name: ``Trainer(strategy="speedkit_pipeline")``. ``training_step`` has to call the attribute once, with one
    tensor, and to return a loss that is a mean over samples. ``configure_optimizers`` sees the parameters of its own
    stage only.

    Args:
        attribute: The name of the ``nn.Sequential``, with dots if it lies deeper; ``None`` takes the only one.
        pipeline_size: How many processes make a pipeline; ``None`` takes all. It divides the number of processes; with
            4 processes and 2, two pipelines train on data of their own.
        microbatches: How many parts a batch is cut into.
        schedule: ``"gpipe"``, ``"1f1b"`` (holds fewer activations) or ``"interleaved"`` (several stages per process).
        stages_per_rank: How many stages a process has; more than 1 only with ``"interleaved"``, which needs at least 2.
        split_points: The index of the first layer of each stage but the first. ``None`` cuts by measured seconds if
            the module has an ``example_input_array``, else by the number of parameters.
        process_group_backend: ``"nccl"``, ``"gloo"``, ...; ``None`` takes the one for the device.
        timeout_seconds: How long a collective may take before the run fails.

    Raises:
        ValueError: An argument is not allowed.
        MisconfigurationException: At ``fit``: the model or the Trainer asks for what a pipeline would do wrongly.

    Example:

        >>> from lightning.pytorch import Trainer
        >>> strategy = PipelineStrategy("net", microbatches=8)
        >>> trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)
    """

    def __init__(
        self,
        attribute: str | None = None,
        pipeline_size: int | None = None,
        microbatches: int = 4,
        schedule: Schedule = "1f1b",
        stages_per_rank: int | None = None,
        split_points: list[int] | None = None,
        process_group_backend: str | None = None,
        timeout_seconds: float = 1800.0,
    ) -> None:
        if schedule not in get_args(Schedule):
            raise ValueError(f"schedule={schedule!r} is unknown; use one of {get_args(Schedule)}.")
        per_rank = (2 if schedule == "interleaved" else 1) if stages_per_rank is None else stages_per_rank
        least = {"microbatches": (microbatches, 1), "stages_per_rank": (per_rank, 1)}
        if pipeline_size is not None:
            least["pipeline_size"] = (pipeline_size, 2)
        for name, (value, smallest) in least.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
                raise ValueError(f"{name}={value!r} must be a whole number of at least {smallest}.")
        if (per_rank > 1) != (schedule == "interleaved"):
            raise ValueError(
                f"stages_per_rank={per_rank} does not go with schedule={schedule!r}: 'interleaved' needs at least 2, "
                "the others have 1."
            )
        super().__init__(process_group_backend=process_group_backend, timeout=checked_timeout(timeout_seconds))
        self._attribute = attribute
        self._pipeline_size = pipeline_size
        self._microbatches = microbatches
        self._schedule: Schedule = schedule
        self._per_rank = per_rank
        self._split_points = None if split_points is None else list(split_points)
        self._groups: tuple[Any, Any] | None = None
        self._whole: nn.Module | None = None
        self._failed = False
        self._sends = True

    @property
    def pipeline_size(self) -> int:
        """How many processes make a pipeline."""
        return self._pipeline_size or self.world_size

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        size = self.pipeline_size  # all stages of a pipeline get the same batches
        return {"num_replicas": self.world_size // size, "rank": self.global_rank // size}

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        size, world = self.pipeline_size, self.world_size
        if world < 2 or world % size:
            raise MisconfigurationException(
                f"{world} processes do not make pipelines of {max(size, 2)}: pipeline_size must divide the number of "
                "processes, which is at least 2. Change devices, num_nodes or pipeline_size."
            )
        if self._schedule == "1f1b" and self._microbatches < size:
            raise MisconfigurationException(
                f"microbatches={self._microbatches} is less than the {size} stages, which '1f1b' cannot run. Use at "
                f"least {size}, or schedule='gpipe'."
            )
        if self._schedule == "interleaved" and self._microbatches % max(1, self._microbatches // size):
            raise MisconfigurationException(
                f"microbatches={self._microbatches} does not divide into rounds of {size} stages, which 'interleaved' "
                f"needs. Use a multiple of {size}."
            )
        if self._groups is None:
            pipelines = [dist.new_group(list(range(i, i + size))) for i in range(0, world, size)]
            replicas = [dist.new_group(list(range(i, world, size))) for i in range(size)]
            self._groups = pipelines[self.global_rank // size], replicas[self.global_rank % size]

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        fits = trainer.state.fn == TrainerFn.FITTING
        self._check_trainer(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self._failed = False
        self._split()
        self.model_to_device()
        if fits:
            self.setup_optimizers(trainer)
            if len(self.optimizers) != 1 or isinstance(self.optimizers[0], LBFGS):
                raise MisconfigurationException(
                    f"configure_optimizers gave {[type(o).__name__ for o in self.optimizers]}: a pipeline trains with "
                    "one optimizer that evaluates the loss once per step."
                )
        self.setup_precision_plugin()
        setattr(self.precision_plugin, "clip_grad_by_norm", self._clip_by_norm)  # noqa: B010  # taken back in teardown

    def _check_trainer(self, trainer: pl.Trainer) -> None:
        module = trainer.lightning_module
        if trainer.state.fn == TrainerFn.FITTING and not module.automatic_optimization:
            raise MisconfigurationException(
                "A pipeline runs forward and backward of all micro-batches at once, so manual optimization "
                "(automatic_optimization=False) cannot place its own. Use automatic optimization, or DDP."
            )
        for callback in vars(trainer)["callbacks"]:
            averages = isinstance(callback, (WeightAveraging, StochasticWeightAveraging))
            if averages or type(callback).__name__ in _SEE_ALL:
                raise MisconfigurationException(
                    f"{type(callback).__name__} works on all layers, gradients or weights together, and in a pipeline "
                    "each process has those of its own stages. Leave it out; to clip, use the Trainer's "
                    "gradient_clip_val."
                )
        precision = str(getattr(self.precision_plugin, "precision", "unknown"))
        if precision not in _PRECISIONS:
            raise MisconfigurationException(
                f"precision={precision!r} does not work in a pipeline, whose gradients cross stages unscaled and in "
                f"the dtype of the activations. Use one of {', '.join(_PRECISIONS)}."
            )

    def _split(self) -> None:
        module = self.lightning_module
        assert module is not None
        assert self._groups is not None
        for tensor in [*module.parameters(), *module.buffers()]:  # all start from the weights of rank 0
            sent = tensor.detach().to(self.root_device).contiguous()
            dist.broadcast(sent, src=0)
            tensor.detach().copy_(sent)
        name = find_chain(module, self._attribute)
        whole = module.get_submodule(name)
        size, count = self.pipeline_size, self.pipeline_size * self._per_rank
        points = cut_points(module, name, count) if self._split_points is None else self._split_points
        stages = stages_of(module, name, count, self.broadcast(points))  # measured seconds differ between ranks
        check_layers(module, name, stages)
        names = [layer for stage in stages for layer in stage]
        here = range(self.global_rank % size, count, size)
        made = {
            i: Stage([whole.get_submodule(n) for n in stages[i]], self.precision_plugin.forward_context) for i in here
        }
        mine = [n for i in here for n in stages[i]]
        self._order = list(module.state_dict())
        self._places = {parameter: place for place, parameter in enumerate(module.parameters())}
        layers = PipelinedLayers(whole, mine, made, count, self._groups[0])
        for other in (n for n in names if n not in mine):
            whole.get_submodule(other).to("meta")
        self._whole, self._name, self._layers = whole, name, layers
        module.set_submodule(name, layers)
        self._step = ScheduledStep(module, layers, made, count, self._schedule, self._microbatches, self._groups[0])

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        self._sends = False
        try:
            yield
        finally:
            self._sends = True

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        values = [*args, *kwargs.values()]
        return self._step.run(values[0], values[1:], self.precision_plugin.train_step_context, self._deliver)

    def _deliver(self, gradients: Mapping[nn.Parameter, Tensor], scale: Tensor) -> None:
        """Add the gradients of a schedule to ``.grad``; between the replicas they are averaged before a step."""
        assert self._groups is not None
        for parameter, gradient in gradients.items():
            scaled = gradient * scale.to(gradient)
            parameter.grad = scaled if parameter.grad is None else parameter.grad + scaled
        replicas = dist.get_world_size(self._groups[1])
        if not self._sends or replicas == 1:
            return
        for parameter in self._layers.parameters():
            if parameter.requires_grad and parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=self._groups[1])
                parameter.grad /= replicas

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        assert self._groups is not None
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        square = norm.to(self.root_device) ** 2
        dist.all_reduce(square, group=self._groups[0])
        torch.nn.utils.clip_grads_with_norm_(parameters, float(clip_val), square.sqrt())

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        # the stages of one pipeline know the same value, so it counts once
        return super().reduce(tensor, group or (self._groups[1] if self._groups else None), reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        # Lightning compares a sum with the number of all ranks, so all of them have to be in it
        agreeing = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(agreeing)
        return bool(agreeing == self.world_size) if all else bool(agreeing)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        state = super().lightning_module_state_dict()
        if self._whole is None or self._groups is None:
            return state
        return gather_tensors(state, self._order, self._groups[0])

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self.lightning_module
        assert module is not None
        state = checkpoint["state_dict"]
        if self._whole is not None:
            own = module.state_dict()
            state = {name: value for name, value in state.items() if name in own or name not in self._order}
        module.load_state_dict(state, strict=strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        assert self._groups is not None
        plain = getattr(optimizer, "optimizer", optimizer)
        return gather_optimizer_state(plain, self._places, self._groups[0])

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self._groups is not None
        full = checkpoint["optimizer_states"][0]
        part = optimizer_state_of_stage(full, self.optimizers[0], self._places, self._groups[0])
        self.optimizers[0].load_state_dict(part)

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed = True

    @override
    def teardown(self) -> None:
        vars(self.precision_plugin).pop("clip_grad_by_norm", None)
        if self._whole is not None:
            self._join()
        super().teardown()

    def _join(self) -> None:
        """Put the whole ``nn.Sequential`` back, with the weights of all stages; NaN after a failure."""
        assert self._groups is not None
        assert self._whole is not None
        assert self.lightning_module is not None
        whole, self._whole = self._whole, None
        own = {**dict(self._layers.named_parameters()), **dict(self._layers.named_buffers())}
        found: dict[str, Tensor] = {}
        if not self._failed:
            found = gather_tensors({name: tensor.detach() for name, tensor in own.items()}, [], self._groups[0])
        for layer in whole.children():
            if any(tensor.is_meta for tensor in [*layer.parameters(), *layer.buffers()]):
                layer.to_empty(device="cpu")
        for name, tensor in [*whole.named_parameters(), *whole.named_buffers()]:
            if name in found and name not in own:
                tensor.detach().copy_(found[name])
            elif name not in own and tensor.is_floating_point():
                tensor.detach().fill_(float("nan"))  # the other ranks may be gone, so nobody knows
        self.lightning_module.set_submodule(self._name, whole)

"""Model parallel training of an unchanged LightningModule: its weights are sharded (FSDP2), its layers cut, or both.

What it does: Lightning's ``ModelParallelStrategy`` needs a ``configure_model`` that shards the model. This one shards
it by itself, says how, and gives the plain module back at the end. Gradients are those of one process on the batches
of all data parallel ranks together; clipping takes the norm over all shards; a checkpoint loads on any number of ranks.

When it helps: weights, gradients and optimizer state do not fit on one device. What it costs: each unit's weights are
gathered in the forward and in the backward, and its gradients reduced in each backward, also while accumulating;
tensor parallel sends the activations of each cut block.

Source: Zhao et al. 2023 (FSDP); Shoeybi et al. 2019 (Megatron-LM); Lightning's ``ModelParallelStrategy``.
"""

from __future__ import annotations

import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer
from typing_extensions import override

from lightning_speedkit.measure.lightning_sharded import materialize, set_parallel_sizes
from lightning_speedkit.parallel.argument_checks import checked_timeout
from lightning_speedkit.parallel.plan_checkpoint import is_sharded_checkpoint, read_sharded, write_sharded
from lightning_speedkit.parallel.plan_clip import clip_by_norm, clip_by_value
from lightning_speedkit.parallel.plan_mesh import PlanMesh, plan_sizes
from lightning_speedkit.parallel.plan_refusals import (
    check_arguments,
    check_optimizers,
    check_same_batch,
    check_trainer,
    explained,
)
from lightning_speedkit.parallel.plan_spread import Spread
from lightning_speedkit.parallel.plan_state import copy_weights, optimizer_state, optimizer_state_here, whole_state
from lightning_speedkit.parallel.plan_tensor import check_styles
from lightning_speedkit.parallel.plan_wrap import is_sharded, reshard

__all__ = ["ModelParallelPlan"]

Save = Literal["full", "sharded"]


class ModelParallelPlan(ModelParallelStrategy):
    """Shards a module over the processes (FSDP2), cuts layers across some of them (tensor parallel), or both.

    By name: ``Trainer(strategy="speedkit_model_parallel")``. A module whose ``configure_model`` shards it already is
    taken as it is. Afterwards the module has whole weights, on the CPU, in every process.

    Args:
        data_parallel: How many ranks, or groups of them, get batches of their own; ``"auto"`` takes all there are.
        tensor_parallel: How many ranks share the cut layers, and get the same batches. It and ``data_parallel``
            multiply to the number of processes.
        replicas: How many copies of the weights are kept, each sharded over ``data_parallel / replicas`` ranks (HSDP).
        shard_class: Names of classes of modules to shard as one unit each, as ``["Block"]``; ``None`` goes by size.
        shard_min_parameters: By size: the least number of parameters of a unit. The rest is sharded as one.
        tensor_plan: Which layers are cut: patterns of names and ``"column"``, ``"row"``, ``"gathered"`` or
            ``"embedding"``, and ``"divide"`` for a number such as ``"*.heads"``. ``None`` finds them.
        gather_precision: ``"bf16"`` gathers weights in half the bytes; needs ``Trainer(precision="bf16-mixed")``.
        cpu_offload: Keep shards and optimizer state on the CPU, and step there.
        checkpoint_activations: Compute the activations of the units again in the backward instead of keeping them.
        save: ``"full"``: checkpoints are files of the plain module. ``"sharded"``: folders with a file per rank.
        process_group_backend: ``"nccl"``, ``"gloo"``, ...; ``None`` takes the one for the device.
        timeout_seconds: How long a collective may take before the run fails.

    Raises:
        ValueError: An argument is not allowed.
        TypeError: An argument is of a wrong kind.
        MisconfigurationException: At ``fit``: the module, the Trainer or the number of processes does not allow it.

    Example:

        >>> from lightning.pytorch import Trainer
        >>> strategy = ModelParallelPlan(shard_class=["Block"], save="sharded")
        >>> trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)
    """

    def __init__(
        self,
        data_parallel: int | Literal["auto"] = "auto",
        tensor_parallel: int = 1,
        replicas: int = 1,
        shard_class: list[str] | None = None,
        shard_min_parameters: int = 1_000_000,
        tensor_plan: dict[str, str] | None = None,
        gather_precision: Literal["bf16"] | None = None,
        cpu_offload: bool = False,
        checkpoint_activations: bool = False,
        save: Save = "full",
        process_group_backend: str | None = None,
        timeout_seconds: float = 1800.0,
    ) -> None:
        check_arguments(data_parallel, tensor_parallel, replicas, shard_class, shard_min_parameters, gather_precision)
        for name, switch in (("cpu_offload", cpu_offload), ("checkpoint_activations", checkpoint_activations)):
            if not isinstance(switch, bool):
                raise TypeError(f"{name}={switch!r} must be True or False.")
        if save not in get_args(Save):
            raise ValueError(f"save={save!r} is unknown; use one of {get_args(Save)}.")
        if tensor_plan is not None:
            check_styles(tensor_plan)
            if tensor_parallel == 1:
                raise ValueError("tensor_plan says what to cut, and tensor_parallel=1 cuts nothing; set it to 2.")
        super().__init__(process_group_backend=process_group_backend, timeout=checked_timeout(timeout_seconds))
        self._sizes_asked = (data_parallel, tensor_parallel, replicas)
        self._spread = Spread(
            None if shard_class is None else tuple(shard_class),
            shard_min_parameters,
            None if tensor_plan is None else dict(tensor_plan),
            torch.bfloat16 if gather_precision == "bf16" else None,
            cpu_offload,
            checkpoint_activations,
        )
        self._save: Save = save
        self._mesh: PlanMesh | None = None
        self._failed = False
        self._batch_checked = False

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return True

    @override
    def setup_environment(self) -> None:
        data, tensor, replicas = plan_sizes(*self._sizes_asked, self.num_nodes * self.num_processes)
        set_parallel_sizes(self, data, tensor)
        super().setup_environment()
        self._mesh = PlanMesh.of(self.device_mesh, replicas)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        assert self.accelerator is not None
        assert self._mesh is not None
        self.accelerator.setup(trainer)
        check_trainer(trainer, self.precision_plugin, self._spread)
        self._failed = self._batch_checked = False
        self.precision_plugin.convert_module(module)
        if is_sharded(module):
            self._spread.check_left_alone()
            self.model = module
        else:
            self.model, told = self._spread.over(module, self._mesh, self.root_device)
            rank_zero_info("\n".join(["ModelParallelPlan:", *(f"  {line}" for line in told)]))
        materialize(module, self.root_device)
        self.model_to_device()
        self.barrier()
        self.optimizers, self.lr_scheduler_configs = [], []  # those of an earlier fit have other parameters
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            check_optimizers(self.optimizers)
        self.setup_precision_plugin()
        setattr(self.precision_plugin, "clip_grad_by_norm", self._clip_by_norm)  # noqa: B010  # taken back in teardown
        setattr(self.precision_plugin, "clip_grad_by_value", self._clip_by_value)  # noqa: B010

    @override
    def model_to_device(self) -> None:
        if not self._spread.offload:  # offloaded shards stay; FSDP2 has moved the rest
            super().model_to_device()

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        clip_by_norm(self.precision_plugin.main_params(optimizer), float(clip_val), self.root_device)

    def _clip_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        clip_by_value(self.precision_plugin.main_params(optimizer), float(clip_val))

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._mesh is not None
        if not self._batch_checked:
            check_same_batch([*args, *kwargs.values()][0], self._mesh.tensor)
            self._batch_checked = True
        with explained():
            return super().training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluates():
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluates():
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluates():
            return super().predict_step(*args, **kwargs)

    @contextmanager
    def _evaluates(self) -> Generator[None, None, None]:
        # what FSDP2 gathers in inference mode cannot be trained with afterwards
        with explained(), torch.inference_mode(False), torch.no_grad():
            yield

    @override
    def on_validation_end(self) -> None:
        reshard(self.model)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        # the ranks that share layers know the same value, so it counts once
        return super().reduce(tensor, group or (self._mesh.data_group if self._mesh else None), reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        agreeing = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(agreeing)
        return bool(agreeing == self.world_size) if all else bool(agreeing)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        module = self.lightning_module
        assert module is not None
        reshard(self.model)
        state = module.state_dict()
        return state if self._save == "sharded" else whole_state(state)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return optimizer_state(getattr(optimizer, "optimizer", optimizer), self._save == "full")

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        path = Path(self.broadcast(filepath))
        if self._save == "sharded":
            if storage_options is not None:
                raise TypeError("storage_options belong to a CheckpointIO, which writes no sharded checkpoint.")
            write_sharded(checkpoint, path, self.global_rank)
            return
        if self.is_global_zero:
            if is_sharded_checkpoint(path):
                shutil.rmtree(path)
            self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        module = self.lightning_module
        assert module is not None
        path = Path(self.broadcast(checkpoint_path))
        reshard(self.model)
        if is_sharded_checkpoint(path):
            return read_sharded(path, module, self.optimizers, module.strict_loading, weights_only)
        return self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        copy_weights(self.lightning_module, checkpoint["state_dict"], strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(optimizer_state_here(state, optimizer))

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed = True

    @override
    def teardown(self) -> None:
        for name in ("clip_grad_by_norm", "clip_grad_by_value"):
            vars(self.precision_plugin).pop(name, None)
        if self._spread.is_spread:
            if not self._failed:
                reshard(self.model)
            self._spread.take_back(known=not self._failed)
            self.model = self.lightning_module
        super().teardown()

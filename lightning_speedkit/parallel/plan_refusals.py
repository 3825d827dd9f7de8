"""What a model parallel run would do wrongly, and is refused with a reason."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer
from torch.utils._pytree import tree_leaves

__all__ = ["check_arguments", "check_optimizers", "check_same_batch", "check_trainer", "explained"]

_PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true", "16-true")
# of this kit: they copy modules, or replace their layers or weights
_WANT_WHOLE = (
    *("ActivationCheckpointing", "AutoMicroBatch", "AverageWeights", "BatchSizeSearch", "CompileModel"),
    *("Distillation", "Pruning", "QuantizationAwareTraining", "QuantizeOnFitEnd", "StructuredPruning"),
)


class _Wants(Protocol):
    @property
    def gather_dtype(self) -> torch.dtype | None: ...


def check_arguments(
    data_parallel: Any, tensor_parallel: Any, replicas: Any, shard_class: Any, shard_min_parameters: Any, gather: Any
) -> None:
    """Refuse arguments that no run could follow.

    Raises:
        ValueError: A number is too small, or a name unknown.
        TypeError: A value is of a wrong kind.
    """
    numbers = {"tensor_parallel": tensor_parallel, "replicas": replicas, "shard_min_parameters": shard_min_parameters}
    if data_parallel != "auto":
        numbers["data_parallel"] = data_parallel
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            also = ", or 'auto'" if name == "data_parallel" else ""
            raise ValueError(f"{name}={value!r} must be a whole number of at least 1{also}.")
    if shard_class is not None:
        if isinstance(shard_class, str) or not all(isinstance(name, str) for name in shard_class):
            raise TypeError(f"shard_class={shard_class!r} must be a list of names of classes, as ['Block'].")
        if not shard_class:
            raise ValueError("shard_class=[] names no class; use None to go by size.")
    if gather not in (None, "bf16"):
        raise ValueError(f"gather_precision={gather!r} is unknown; use 'bf16' or None.")


def check_trainer(trainer: pl.Trainer, precision_plugin: Any, wants: _Wants) -> None:
    """Refuse what a Trainer asks for and sharded weights cannot do.

    Raises:
        MisconfigurationException: It says what to do instead.
    """
    if trainer.state.fn == TrainerFn.FITTING and not trainer.lightning_module.automatic_optimization:
        raise MisconfigurationException(
            "FSDP2 reduces gradients when the backward of a whole step ends, so manual optimization "
            "(automatic_optimization=False) cannot place its own. Use automatic optimization, or DDP."
        )
    precision = str(getattr(precision_plugin, "precision", "unknown"))
    if precision not in _PRECISIONS:
        raise MisconfigurationException(
            f"precision={precision!r} does not work with ModelParallelPlan. Use one of {', '.join(_PRECISIONS)}."
        )
    if wants.gather_dtype is not None and precision != "bf16-mixed":
        raise MisconfigurationException(
            f"gather_precision='bf16' gives layers weights in bfloat16, and precision={precision!r} inputs "
            "of another type. Set Trainer(precision='bf16-mixed'), or gather_precision=None."
        )
    for callback in vars(trainer)["callbacks"]:
        averages = isinstance(callback, (WeightAveraging, StochasticWeightAveraging))
        if averages or type(callback).__name__ in _WANT_WHOLE:
            raise MisconfigurationException(
                f"{type(callback).__name__} copies or replaces whole layers or weights, and here a process has a part "
                "of each. Leave it out; to save activations, use checkpoint_activations=True."
            )


def check_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that cannot work on shards.

    Raises:
        MisconfigurationException: It says what to do instead.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS):
            raise MisconfigurationException("LBFGS joins all gradients to one vector, which shards do not allow.")
        for group in optimizer.param_groups:
            meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in group["params"]}
            if (group.get("foreach") or group.get("fused")) and len(meshes) > 1:
                raise MisconfigurationException(
                    f"{type(optimizer).__name__}(foreach=True or fused=True) takes many parameters at once, and here "
                    "cut and whole layers are spread differently. Leave foreach and fused out."
                )


def check_same_batch(batch: Any, mesh: DeviceMesh | None) -> None:
    """Ranks that share layers need the same batches, and the same random numbers; all of them call it.

    Raises:
        MisconfigurationException: On all ranks, if they differ.
    """
    if mesh is None:
        return
    group = mesh.get_group()
    on_gpu = mesh.device_type == "cuda"
    random = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if on_gpu else [])]
    mine = (_digest(t for t in tree_leaves(batch) if isinstance(t, Tensor)), _digest(random))
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    for index, what in enumerate(("batches", "random numbers")):
        if len({one[index] for one in found}) > 1:
            raise MisconfigurationException(
                f"The ranks that share layers (tensor_parallel) have different {what}, so each would train another "
                "model. Call seed_everything before anything else; a sampler of your own has to give them the same."
            )


def _digest(tensors: Iterable[Tensor]) -> str:
    found = hashlib.blake2b()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@contextmanager
def explained() -> Generator[None, None, None]:
    """Say what to do when a step uses weights that are not gathered, instead of what torch says."""
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise MisconfigurationException(
            "A step used a weight that is spread over the ranks outside of the forward of its own module: that one is "
            "sharded as a unit, or cut by the tensor plan, and something else takes its weights. Use shard_class with "
            "the class around both, a higher shard_min_parameters, or a tensor_plan without it."
        ) from error

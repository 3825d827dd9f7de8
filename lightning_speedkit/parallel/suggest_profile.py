"""What one step of a model takes: bytes of parameters and of kept activations, per block, and operations.

One forward and backward is run on fake tensors, which have shapes and no memory, so that a model on the meta device,
of any size, can be looked at on a laptop. What is kept for the backward is told by autograd. The short-lived tensors
of a step are not in it; :func:`lightning_speedkit.memory.estimate_memory` knows them.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

from lightning_speedkit.measure.flops import count_flops
from lightning_speedkit.measure.own_random_numbers import own_random_numbers
from lightning_speedkit.parallel.suggest_blocks import (
    BlockProfile,
    KeptByBlock,
    bytes_of,
    find_blocks,
    profile_block,
    split_limit,
    why_no_pipeline,
)

__all__ = ["PRECISIONS", "EstimatedMemory", "ModelProfile", "profile_model", "with_estimate"]

# Lightning's name -> type of the weights, type of autocast, the format whose speed counts
PRECISIONS: dict[str, tuple[torch.dtype | None, torch.dtype | None, str]] = {
    "32-true": (None, None, "32"),
    "bf16-mixed": (None, torch.bfloat16, "bf16"),
    "16-mixed": (None, torch.float16, "16"),
    "bf16-true": (torch.bfloat16, None, "bf16"),
    "16-true": (torch.float16, None, "16"),
    "64-true": (torch.float64, None, "64"),
}


class EstimatedMemory(Protocol):
    """What is used of the answer of :func:`lightning_speedkit.memory.estimate_memory`."""

    @property
    def parameters(self) -> int: ...
    @property
    def gradients(self) -> int: ...
    @property
    def optimizer_state(self) -> int: ...
    @property
    def activations(self) -> int: ...
    @property
    def phase(self) -> str: ...
    @property
    def precision(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """What one step of one replica of a model takes.

    ``activation_bytes`` is what autograd keeps for the backward, of the whole model, without ``weight_copy_bytes``,
    autocast's 16-bit copies of weights. ``flops`` are those of forward and backward. Tensor parallel ranks must divide
    ``split_limit``, which is 0 where the blocks cannot be split. ``pipeline_path`` is the ``nn.Sequential`` with the
    blocks, and empty, with the reason in ``no_pipeline``, where no pipeline can train the model.
    """

    name: str
    parameters: int
    parameter_bytes: int
    trainable_bytes: int
    buffer_bytes: int
    activation_bytes: float
    weight_copy_bytes: int
    batch_bytes: int
    batch_size: int
    flops: int
    blocks: tuple[BlockProfile, ...] = ()
    split_limit: int = 0
    pipeline_path: str = ""
    no_pipeline: str = ""


def profile_model(
    module: nn.Module, batch: Any, *, loss: Callable[[Any, Any], Tensor] | None = None, precision: str = "32-true"
) -> ModelProfile:
    """Count one forward and backward of a module, without computing it.

    Args:
        module: A LightningModule, whose ``training_step`` is run, or a plain module. It is not changed.
        batch: What one step gets: for a plain module its inputs, or with ``loss`` a pair of inputs and target.
        loss: For a plain module; without it the mean of its outputs.
        precision: Lightning's name of the precision.

    Raises:
        ValueError: The module cannot run with the batch, or needs values to run, or ``precision`` is unknown.
        TypeError: ``module`` is no module.

    >>> profile = profile_model(nn.Linear(8, 4), torch.zeros(16, 8))
    >>> profile.parameters, profile.parameter_bytes, profile.batch_size, profile.flops
    (36, 144, 16, 2048)
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be an nn.Module, got {getattr(module, '__name__', type(module).__name__)}.")
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r} is not one of {', '.join(map(repr, PRECISIONS))}.")
    if any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        raise ValueError(f"{type(module).__name__} has lazy parameters without a shape; run it once before planning.")
    try:
        with own_random_numbers(), warnings.catch_warnings(), _without_tracebacks():
            warnings.simplefilter("ignore")  # self.log() tells that there is no Trainer
            return _profile(module, batch, loss, precision)
    except Exception as error:
        shapes = [tuple(leaf.shape) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        reason = (str(error).strip() or "no message").splitlines()[0]
        raise ValueError(
            f"{type(module).__name__} cannot run without data on a batch with tensors of shape {shapes}: "
            f"{type(error).__name__}: {reason} Give the batch that one training step gets. A plain module with a "
            "target needs loss=... too. A step that looks at values, as .item() does, cannot be counted: give the "
            "network itself and a loss."
        ) from error


def with_estimate(profile: ModelProfile, memory: EstimatedMemory, precision: str) -> tuple[ModelProfile, float]:
    """The profile with the estimate's activations, and the values that the optimizer keeps per parameter."""
    if memory.precision != precision or memory.parameters != profile.parameter_bytes:
        raise ValueError(
            f"memory is an estimate in {memory.precision} with {memory.parameters} bytes of parameters; the module in "
            f"{precision} has {profile.parameter_bytes}. Estimate the same module in the same precision."
        )
    counted = profile.activation_bytes + profile.weight_copy_bytes
    held: float = memory.activations
    if memory.phase == "optimizer step":  # the backward's peak is below; its gradients were not all there
        held = max(held, min(counted, memory.activations + memory.gradients))
    activations = max(0.0, held - profile.weight_copy_bytes)
    factor = activations / profile.activation_bytes if profile.activation_bytes else 0.0
    blocks = tuple(replace(block, activation_bytes=block.activation_bytes * factor) for block in profile.blocks)
    states = memory.optimizer_state / profile.trainable_bytes if profile.trainable_bytes else 0.0
    return replace(profile, activation_bytes=activations, blocks=blocks), states


def _profile(module: nn.Module, batch: Any, loss: Callable[[Any, Any], Tensor] | None, precision: str) -> ModelProfile:
    weights, autocast, _ = PRECISIONS[precision]
    with FakeTensorMode(allow_non_fake_inputs=True), _default_type(weights):
        model = _copied(module, weights)
        inputs = tree_map(lambda leaf: _fake(leaf, weights) if isinstance(leaf, Tensor) else leaf, batch)
        paths, container = find_blocks(model)
        tape = KeptByBlock(model, paths)

        def step() -> None:
            model.zero_grad(set_to_none=True)
            with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
                value = _loss_of(model, inputs, loss)
            value.backward()  # type: ignore[no-untyped-call]

        with tape.recording():
            step()
        flops = count_flops(step)
        tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        reason = why_no_pipeline(model, container)
        return ModelProfile(
            name=type(module).__name__,
            parameters=sum(p.numel() for p in model.parameters()),
            parameter_bytes=bytes_of(model.parameters()),
            trainable_bytes=bytes_of(p for p in model.parameters() if p.requires_grad),
            buffer_bytes=bytes_of(model.buffers()),
            activation_bytes=sum(tape.saved.values()),
            weight_copy_bytes=tape.weight_copies,
            batch_bytes=bytes_of(tensors),
            batch_size=next((len(leaf) for leaf in tensors if leaf.ndim), 1),
            flops=flops,
            blocks=tuple(profile_block(path, model.get_submodule(path), tape) for path in paths),
            split_limit=split_limit(model, paths),
            pipeline_path="" if reason or container is None else container,
            no_pipeline=reason,
        )


def _loss_of(module: nn.Module, batch: Any, loss: Callable[[Any, Any], Tensor] | None) -> Tensor:
    step: Callable[..., Any] | None = getattr(module, "training_step", None)
    value: Any
    if step is not None:
        if loss is not None:
            raise ValueError("loss belongs to a plain module; a LightningModule has its own in training_step.")
        if not getattr(module, "automatic_optimization", True):
            raise ValueError("the module optimizes manually, so that its steps cannot be told apart.")
        output = step(batch, 0) if is_param_in_hook_signature(step, "batch_idx", min_args=2) else step(batch)
        value = output.get("loss") if isinstance(output, Mapping) else output
    elif loss is not None:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            got = "a tensor" if isinstance(batch, Tensor) else type(batch).__name__
            raise ValueError(f"with loss, batch is a pair of inputs and target, got {got}.")
        value = loss(_called(module, batch[0]), batch[1])
    else:
        leaves = [leaf for leaf in tree_leaves(_called(module, batch)) if isinstance(leaf, Tensor)]
        value = sum(leaf.float().mean() for leaf in leaves if leaf.requires_grad)
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"the loss is {got}; a scalar that needs a gradient is wanted.")
    return value


def _called(module: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, (tuple, list)) else module(inputs)


def _copied(module: nn.Module, weights: torch.dtype | None) -> nn.Module:
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        like = _fake(tensor, weights)
        memo[id(tensor)] = nn.Parameter(like, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else like
    with contextlib.suppress(AttributeError, RuntimeError):  # where no trainer is attached
        if hasattr(module, "training_step"):
            memo[id(module.trainer)] = None
    return copy.deepcopy(module, memo).train()


def _fake(tensor: Tensor, weights: torch.dtype | None) -> Tensor:
    kind = weights if weights is not None and tensor.is_floating_point() else tensor.dtype
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device="cpu")


@contextlib.contextmanager
def _default_type(weights: torch.dtype | None) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(weights or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _without_tracebacks() -> Iterator[None]:
    """torch logs the traceback of a wrong shape, which is told by our own error."""
    logger, nothing = logging.getLogger("torch._subclasses.fake_tensor"), logging.Filter("nothing")
    logger.addFilter(nothing)
    try:
        yield
    finally:
        logger.removeFilter(nothing)

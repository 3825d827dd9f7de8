"""What one step of a model takes: bytes of parameters and of saved activations, per block, and operations.

One forward and backward is run on fake tensors, which have shapes and no memory, so that a model on the meta device of
any size can be looked at on a laptop. A step that depends on values is run for real on a copy, on the CPU.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

from lightning_speedkit.measure.flops import count_flops
from lightning_speedkit.measure.own_random_numbers import own_random_numbers
from lightning_speedkit.parallel.suggest_step import loss_of

__all__ = ["PRECISIONS", "BlockProfile", "ModelProfile", "profile_model"]

# Lightning's name -> type of the weights, type of autocast, the format whose speed counts
PRECISIONS: dict[str, tuple[torch.dtype | None, torch.dtype | None, str]] = {
    "32-true": (None, None, "32"),
    "bf16-mixed": (None, torch.bfloat16, "bf16"),
    "16-mixed": (None, torch.float16, "16"),
    "bf16-true": (torch.bfloat16, None, "bf16"),
    "16-true": (torch.float16, None, "16"),
    "64-true": (torch.float64, None, "64"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockProfile:
    """One of the repeated blocks of a model. ``linear_bytes`` are parameters of ``nn.Linear``, which can be split."""

    path: str
    parameter_bytes: int
    trainable_bytes: int
    linear_bytes: int
    activation_bytes: int
    output_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """What one step of one replica of a model takes.

    ``activation_bytes`` is what autograd keeps for the backward, of the whole model; a block's own is among it.
    ``flops`` are those of forward and backward. ``split_limit`` is the number that tensor parallel ranks must divide,
    and 0 where the blocks are not such that they can be split. ``pipeline_container`` is the path of the
    ``nn.Sequential`` that holds the blocks, and ``None`` where none does.
    """

    name: str
    parameters: int
    parameter_bytes: int
    trainable_bytes: int
    buffer_bytes: int
    activation_bytes: int
    batch_bytes: int
    batch_size: int
    flops: int
    blocks: tuple[BlockProfile, ...] = ()
    split_limit: int = 0
    pipeline_container: str | None = None


def profile_model(
    module: nn.Module, batch: Any, *, loss: Callable[[Any, Any], Tensor] | None = None, precision: str = "32-true"
) -> ModelProfile:
    """Count one forward and backward of a module, without computing it where that is possible.

    Args:
        module: A LightningModule, whose ``training_step`` is run, or a plain module. It is not changed.
        batch: What one step gets: for a plain module its inputs, or with ``loss`` a pair of inputs and target.
        loss: For a plain module; without it the mean of its outputs.
        precision: Lightning's name of the precision.

    Raises:
        ValueError: The module cannot run with the batch, or ``precision`` is unknown.

    >>> profile = profile_model(nn.Linear(8, 4), torch.zeros(16, 8))
    >>> profile.parameters, profile.parameter_bytes, profile.batch_size
    (36, 144, 16)
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be an nn.Module, got {type(module).__name__}.")
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r} is not one of {', '.join(map(repr, PRECISIONS))}.")
    if any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        raise ValueError(f"{type(module).__name__} has lazy parameters without a shape; run it once before planning.")
    try:
        return _profile(module, batch, loss, precision, fake=True)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            raise ValueError(
                f"The step of {type(module).__name__} depends on values ({error}), and its parameters are on the meta "
                "device, where there are none. Build a smaller one on the CPU to plan with."
            ) from error
    except Exception as error:
        raise _cannot_run(module, batch, error) from error
    try:
        return _profile(module, batch, loss, precision, fake=False)
    except Exception as error:
        raise _cannot_run(module, batch, error) from error


def _cannot_run(module: nn.Module, batch: Any, error: Exception) -> ValueError:
    shapes = [tuple(leaf.shape) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    reason = (str(error).strip() or "no message").splitlines()[0]
    return ValueError(
        f"{type(module).__name__} cannot run with the batch (tensors of shape {shapes}): {type(error).__name__}: "
        f"{reason} Give the batch that one training step gets, and for a plain module with a target loss=... too."
    )


def _profile(
    module: nn.Module, batch: Any, loss: Callable[[Any, Any], Tensor] | None, precision: str, *, fake: bool
) -> ModelProfile:
    weights, autocast, _ = PRECISIONS[precision]
    mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else contextlib.nullcontext()
    with own_random_numbers(), warnings.catch_warnings(), _quiet(), mode, _default_type(weights):
        warnings.simplefilter("ignore")  # self.log() tells that there is no Trainer
        model = _copied(module, weights, fake)
        inputs = tree_map(lambda leaf: _tensor(leaf, weights, fake) if isinstance(leaf, Tensor) else leaf, batch)
        paths, container = _find_blocks(model)
        tape = _Tape(model, paths)

        def step() -> None:
            model.zero_grad(set_to_none=True)
            with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
                value = loss_of(model, inputs, loss)
            value.backward()  # type: ignore[no-untyped-call]

        with tape.recording():
            step()
        flops = count_flops(step)
        blocks = tuple(_block(path, model.get_submodule(path), tape) for path in paths)
        tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        return ModelProfile(
            name=type(module).__name__,
            parameters=sum(p.numel() for p in model.parameters()),
            parameter_bytes=_bytes(model.parameters()),
            trainable_bytes=_bytes(p for p in model.parameters() if p.requires_grad),
            buffer_bytes=_bytes(model.buffers()),
            activation_bytes=sum(tape.saved.values()),
            batch_bytes=_bytes(iter(tensors)),
            batch_size=next((len(leaf) for leaf in tensors if leaf.ndim), 1),
            flops=flops,
            blocks=blocks,
            split_limit=_split_limit(model, paths),
            pipeline_container=container,
        )


class _Tape:
    """What autograd saves while it records, by the block that ran; parameters and buffers are not counted."""

    def __init__(self, model: nn.Module, paths: tuple[str, ...]) -> None:
        self.saved: Counter[str] = Counter()
        self.outputs: Counter[str] = Counter()
        self._blocks = {path: model.get_submodule(path) for path in paths}
        self._seen = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._kept: list[Tensor] = []  # so that no storage is freed and its number given again
        self._current = ""

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        hooks = [
            hook
            for path, block in self._blocks.items()
            for hook in (
                block.register_forward_pre_hook(lambda module, inputs, path=path: self._enter(path)),
                block.register_forward_hook(lambda module, inputs, output, path=path: self._leave(path, output)),
            )
        ]
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
                yield
        finally:
            for hook in hooks:
                hook.remove()
            self._kept.clear()

    def _enter(self, path: str) -> None:
        self._current = path

    def _leave(self, path: str, output: Any) -> None:
        self._current = ""
        self.outputs[path] = sum(t.numel() * t.element_size() for t in tree_leaves(output) if isinstance(t, Tensor))

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = _storage(tensor)
        if storage not in self._seen:
            self._seen.add(storage)
            self._kept.append(tensor.detach())
            self.saved[self._current] += tensor.untyped_storage().nbytes()
        return tensor


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _copied(module: nn.Module, weights: torch.dtype | None, fake: bool) -> nn.Module:
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        like = _tensor(tensor.detach(), weights, fake)
        memo[id(tensor)] = nn.Parameter(like, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else like
    trainer = _trainer(module)
    if trainer is not None:
        memo[id(trainer)] = object()
    model = copy.deepcopy(module, memo)
    if trainer is not None:
        setattr(model, "trainer", None)  # noqa: B010
    return model.train()


def _trainer(module: nn.Module) -> Any:
    try:
        return getattr(module, "trainer", None)
    except RuntimeError:  # Lightning, where none is attached
        return None


def _tensor(tensor: Tensor, weights: torch.dtype | None, fake: bool) -> Tensor:
    kind = weights if weights is not None and tensor.is_floating_point() else tensor.dtype
    if not fake:
        return tensor.detach().to("cpu", kind, copy=True)
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
def _quiet() -> Iterator[None]:
    """torch logs the traceback of a wrong shape, which is told by our own error."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def none(record: logging.LogRecord) -> bool:
        return False

    logger.addFilter(none)
    try:
        yield
    finally:
        logger.removeFilter(none)


def _find_blocks(model: nn.Module) -> tuple[tuple[str, ...], str | None]:
    """Paths of the repeated blocks of the container with most parameters, and its path if it is a Sequential."""
    best: tuple[int, tuple[str, ...], str | None] = (0, (), None)
    for prefix, parent in model.named_modules():
        if not isinstance(parent, (nn.Sequential, nn.ModuleList)):
            continue
        children = list(parent.named_children())
        count = Counter(type(child) for _, child in children if next(child.children(), None) is not None)
        repeated = [name for name, child in children if count[type(child)] >= 2]
        size = sum(p.numel() for name in repeated for p in parent.get_submodule(name).parameters())
        if size > best[0]:
            paths = tuple(f"{prefix}.{name}" if prefix else name for name in repeated)
            best = (size, paths, prefix if isinstance(parent, nn.Sequential) and prefix else None)
    return best[1], best[2]


def _split_limit(model: nn.Module, paths: tuple[str, ...]) -> int:
    limit = 0
    for path in paths:
        modules = list(model.get_submodule(path).modules())
        linear = [module for module in modules if isinstance(module, nn.Linear)]
        if len(linear) < 2 or any(isinstance(module, nn.MultiheadAttention) for module in modules):
            return 0
        limit = math.gcd(limit, *(size for module in linear for size in (module.in_features, module.out_features)))
    return limit


def _block(path: str, block: nn.Module, tape: _Tape) -> BlockProfile:
    linear = {p: None for module in block.modules() if isinstance(module, nn.Linear) for p in module.parameters()}
    return BlockProfile(
        path=path,
        parameter_bytes=_bytes(block.parameters()),
        trainable_bytes=_bytes(p for p in block.parameters() if p.requires_grad),
        linear_bytes=_bytes(iter(linear)),
        activation_bytes=tape.saved[path],
        output_bytes=tape.outputs[path],
    )


def _bytes(tensors: Iterator[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

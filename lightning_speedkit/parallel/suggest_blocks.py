"""The repeated blocks of a model: where they are, if they can be split or spread, what autograd keeps of each."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

__all__ = ["BlockProfile", "KeptByBlock", "bytes_of", "find_blocks", "profile_block", "split_limit", "why_no_pipeline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockProfile:
    """One of the repeated blocks of a model. ``linear_bytes`` are parameters of ``nn.Linear``, which can be split."""

    path: str
    class_name: str
    parameter_bytes: int
    trainable_bytes: int
    linear_bytes: int
    activation_bytes: float
    output_bytes: int


class KeptByBlock:
    """What autograd saves while it records, by the block that ran; parameters and buffers are not counted."""

    def __init__(self, model: nn.Module, paths: tuple[str, ...]) -> None:
        self.saved: Counter[str] = Counter()
        self.outputs: Counter[str] = Counter()
        self.weight_copies = 0
        self._blocks = {path: model.get_submodule(path) for path in paths}
        self._seen = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
        self._kept: list[Tensor] = []  # so that no storage is freed and its number given again
        self._current = ""

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for path, block in self._blocks.items():
                stack.callback(block.register_forward_pre_hook(lambda *_, path=path: self._enter(path)).remove)
                stack.callback(block.register_forward_hook(lambda *a, path=path: self._leave(path, a[-1])).remove)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor))
            yield
        self._kept.clear()

    def _enter(self, path: str) -> None:
        self._current = path

    def _leave(self, path: str, output: Any) -> None:
        self._current = ""
        self.outputs[path] = bytes_of(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._kept.append(tensor.detach())
            if _is_cast_parameter(tensor):
                self.weight_copies += storage.nbytes()
            else:
                self.saved[self._current] += storage.nbytes()
        return tensor


def _is_cast_parameter(tensor: Tensor) -> bool:
    """Whether autograd knows it as a parameter in another type, as autocast makes them, perhaps transposed."""
    node: Any = tensor.grad_fn
    while node is not None and node.name() in ("TBackward0", "TransposeBackward0", "ViewBackward0"):
        node = node.next_functions[0][0]
    if node is None or not node.name().startswith("ToCopyBackward"):
        return False
    source = node.next_functions[0][0]
    return isinstance(getattr(source, "variable", None), nn.Parameter)


def find_blocks(model: nn.Module) -> tuple[tuple[str, ...], str | None]:
    """Paths of the repeated blocks of the container with most parameters, and its path if it is a Sequential.

    Blocks are modules with modules in them, of a class that comes at least twice in an ``nn.Sequential`` or
    ``nn.ModuleList``.

    >>> find_blocks(nn.ModuleDict({"net": nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(2)))}))
    (('net.0', 'net.1'), 'net')
    """
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


def why_no_pipeline(model: nn.Module, container: str | None) -> str:
    """What :class:`~lightning_speedkit.parallel.pipeline.PipelineStrategy` would refuse; empty if nothing.

    >>> why_no_pipeline(nn.ModuleDict({"net": nn.Sequential(nn.Linear(2, 2)), "head": nn.Linear(2, 1)}), "net")
    "'net' does not hold all parameters that are trained"
    """
    if container is None:
        return "the blocks are not in one nn.Sequential that is an attribute of the module"
    chain = model.get_submodule(container)
    inside = {id(p) for p in chain.parameters()}
    if any(p.requires_grad and id(p) not in inside for p in model.parameters()):
        return f"{container!r} does not hold all parameters that are trained"
    uses = Counter(id(p) for layer in chain.children() for p in {id(p): p for p in layer.parameters()}.values())
    if any(count > 1 for count in uses.values()):
        return "layers share weights"
    if any(isinstance(layer, _BatchNorm) for layer in chain.modules()):
        return "BatchNorm would count micro-batches"
    return ""


def split_limit(model: nn.Module, paths: tuple[str, ...]) -> int:
    """The greatest number that divides all sizes of the linear layers of the blocks; 0 if they cannot be split.

    A block needs two linear layers, the first split by columns and the second by rows.

    >>> split_limit(nn.Sequential(nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8))), ("0",))
    4
    """
    limit = 0
    for path in paths:
        modules = list(model.get_submodule(path).modules())
        linear = [module for module in modules if isinstance(module, nn.Linear)]
        if len(linear) < 2 or any(isinstance(module, nn.MultiheadAttention) for module in modules):
            return 0
        limit = math.gcd(limit, *(size for module in linear for size in (module.in_features, module.out_features)))
    return limit


def profile_block(path: str, block: nn.Module, tape: KeptByBlock) -> BlockProfile:
    """The block's parameters, and what was recorded of it."""
    linear = {p: None for module in block.modules() if isinstance(module, nn.Linear) for p in module.parameters()}
    return BlockProfile(
        path=path,
        class_name=type(block).__name__,
        parameter_bytes=bytes_of(block.parameters()),
        trainable_bytes=bytes_of(p for p in block.parameters() if p.requires_grad),
        linear_bytes=bytes_of(linear),
        activation_bytes=tape.saved[path],
        output_bytes=tape.outputs[path],
    )


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Of all elements, also where several tensors share a storage.

    >>> bytes_of([torch.zeros(3)])
    12
    """
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

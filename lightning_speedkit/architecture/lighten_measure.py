"""What each layer does when the example runs, how many operations a model takes, and seconds of two calls in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_speedkit.measure import flops
from lightning_speedkit.measure.clocks import clock_for
from lightning_speedkit.measure.own_random_numbers import own_random_numbers

__all__ = [
    "Use",
    "call_model",
    "count_flops",
    "device_of",
    "evaluating",
    "float_outputs",
    "paired_seconds",
    "record_uses",
]

_LEAST_PAIRS = 5


@dataclass(frozen=True, slots=True)
class Use:
    """What one layer does in the example: multiply-adds in all its calls, and the input of its largest call."""

    multiply_adds: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool

    def input(self, device: torch.device) -> Tensor:
        """An input like that one, for timing.

        >>> Use(64, (2, 4), torch.float32, False).input(torch.device("cpu")).shape
        torch.Size([2, 4])
        """
        made = torch.full(self.shape, 0.5, dtype=self.dtype, device=device)
        return made.to(memory_format=torch.channels_last) if self.channels_last else made


def call_model(model: nn.Module, example: Any) -> Any:
    """``example`` is a function of the model, a dict of keyword arguments, a tuple of arguments, or the one argument.

    The model gets copies of the tensors.

    >>> call_model(nn.Identity(), (torch.ones(1),)), call_model(nn.Identity(), lambda model: model(2))
    (tensor([1.]), 2)
    """
    if callable(example) and not isinstance(example, Tensor):
        return example(model)
    example = tree_map_only(Tensor, torch.clone, example)
    if isinstance(example, Mapping):
        return model(**example)
    return model(*example) if isinstance(example, tuple) else model(example)


@contextmanager
def evaluating(model: nn.Module, *, fused_attention: bool = True) -> Iterator[None]:
    """Eval mode, no gradients, and random numbers that nobody else will miss; all as before afterwards.

    torch's fused path through transformer layers, in which single layers are not seen, is off on request.
    """
    modes = [(module, module.training) for module in model.modules()]
    fused = torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad(), own_random_numbers(device_of(model)):
        try:
            torch.backends.mha.set_fastpath_enabled(fused and fused_attention)
            model.eval()
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)
            for module, mode in modes:
                module.training = mode


def record_uses(model: nn.Module, layers: Mapping[str, nn.Module], example: Any) -> dict[str, Use]:
    """What each of ``layers``, which are in ``model``, does when the example runs; without those that do not run.

    >>> net = nn.Sequential(nn.Linear(8, 4))
    >>> record_uses(net, {"0": net[0]}, torch.zeros(2, 8))["0"].multiply_adds
    64
    """
    uses: dict[str, Use] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            given = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
            work = output.numel() * layer.get_parameter("weight")[0].numel()
            before = uses.get(name)
            last = given.ndim == 4 and given.is_contiguous(memory_format=torch.channels_last) and given.shape[1] > 1
            use = Use(work, tuple(given.shape), given.dtype, last and not given.is_contiguous())
            if before is not None:
                largest = use if given.numel() > torch.Size(before.shape).numel() else before
                use = Use(work + before.multiply_adds, largest.shape, largest.dtype, largest.channels_last)
            uses[name] = use

        return hook

    handles = [layer.register_forward_hook(note(name), with_kwargs=True) for name, layer in layers.items()]
    try:
        with evaluating(model, fused_attention=False):
            call_model(model, example)
    finally:
        for handle in handles:
            handle.remove()
    return uses


def count_flops(model: nn.Module, example: Any) -> int:
    """Floating-point operations of one forward, two for a multiply-add, by torch's own counter.

    >>> count_flops(nn.Linear(8, 4), torch.zeros(2, 8))
    128
    """
    with evaluating(model):
        return flops.count_flops(lambda: call_model(model, example))


def float_outputs(model: nn.Module, example: Any) -> list[Tensor]:
    """The floating-point tensors of what the model answers in eval mode."""
    with evaluating(model):
        told = call_model(model, example)
    return [leaf for leaf in tree_leaves(told) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def paired_seconds(
    one: Callable[[], object], other: Callable[[], object], device: torch.device, budget_seconds: float
) -> tuple[float, float]:
    """The median seconds of a call of each, in turns, on the threads that torch has now.

    At least five pairs are timed after one that is not, and more until the budget is spent.

    >>> min(paired_seconds(lambda: sum(range(999)), lambda: sum(range(9)), torch.device("cpu"), 0.01)) > 0
    True
    """
    clock = clock_for(device)
    first: list[float] = []
    second: list[float] = []
    one(), other()
    end = time.perf_counter() + budget_seconds
    while len(first) < _LEAST_PAIRS or time.perf_counter() < end:
        turn = ((one, first), (other, second))
        for function, seconds in turn if len(first) % 2 == 0 else reversed(turn):
            start = clock.mark()
            function()
            stop = clock.mark()
            clock.wait()
            seconds.append(clock.seconds(start, stop))
    return statistics.median(first), statistics.median(second)


def device_of(model: nn.Module) -> torch.device:
    """Where the first parameter or buffer is; the CPU if there is none.

    >>> device_of(nn.ReLU())
    device(type='cpu')
    """
    return next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))

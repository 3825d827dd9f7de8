"""What the policies of activation checkpointing save in memory and cost in time, on a small transformer.

``saved_bytes`` is what the allocator holds more after the forward than before it: saved tensors, kept outputs, and the
loss. Seconds are the median of a training step, forward to optimizer step. The last two metrics count tensors that are
not those of the plain run to the last bit: gradients of one step of the transformer, and buffers of a network with
BatchNorm after 20 steps.

    python -m benchmarks.activation_checkpointing [--rounds 5] [--smoke]
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from benchmarks.harness import Variant, benchmark_arguments, run_benchmark

if TYPE_CHECKING:
    from torch import Tensor, nn

_FUNCTION = "benchmarks.activation_checkpointing:measure"
_KEPT = "lightning_speedkit.memory.recomputation.KeptOutputs"


def measure(
    steps: int,
    options: dict[str, Any] | None = None,
    by_torch: bool = False,
    depth: int = 12,
    width: int = 128,
    attention_dropout: bool = True,
) -> dict[str, float]:
    """Train a transformer on random tokens, with its blocks checkpointed as ``options`` say.

    ``by_torch`` keeps outputs by ``torch.utils.checkpoint.create_selective_checkpoint_contexts``.
    """
    import torch
    from torch import nn

    from lightning_speedkit.memory import checkpoint_modules

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
    if not attention_dropout:  # so that a fused kernel computes the attention, on a CPU too
        layer.self_attn.dropout = 0.0
    plain = nn.Sequential(nn.TransformerEncoder(layer, depth, enable_nested_tensor=False), nn.Linear(width, 16))
    model = copy.deepcopy(plain)
    if options is not None:
        checkpoint_modules(model, **options)
    x, y = torch.randn(16, 64, width), torch.randint(16, (16, 64))

    def loss_of(network: nn.Module) -> Tensor:
        return nn.functional.cross_entropy(network(x).flatten(0, 1), y.flatten())

    with patch(_KEPT, _ByTorch) if by_torch else patch(_KEPT, _kept()):
        saved = _held_bytes(lambda: loss_of(model))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        differ = _differing_gradients(loss_of, plain, model)
        del plain
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
            times.append(time.perf_counter() - start)
        return {
            "saved_bytes": saved,
            "seconds_per_step": statistics.median(times[1:] or times),
            "differing_gradients": differ,
            "differing_buffers": _differing_buffers(options),
        }


class _ByTorch:
    """Torch's way to keep outputs, in the form of ours."""

    def __init__(self, operations: frozenset[Any], bits: bool = False) -> None:
        from torch.utils.checkpoint import create_selective_checkpoint_contexts

        self._contexts = create_selective_checkpoint_contexts(list(operations))

    def recording(self) -> Any:
        return self._contexts[0]

    def replaying(self) -> Any:
        return self._contexts[1]

    def clear(self) -> None:
        """It lets go by itself."""


def _kept() -> Any:
    from lightning_speedkit.memory.checkpoint_policy_kept import KeptOutputs

    return KeptOutputs


def _held_bytes(run: Callable[[], Tensor]) -> int:
    """What the allocator gave out in the run, less what it got back, while the result is alive."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(2):
        run().backward()  # gradients and caches are there
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = run()
    held = sum(event.self_cpu_memory_usage for event in profiler.key_averages())
    loss.backward()
    return int(held)


def _differing_gradients(loss_of: Callable[[nn.Module], Tensor], plain: nn.Module, model: nn.Module) -> int:
    import torch

    gradients = []
    for network in (plain, model):
        torch.manual_seed(1)
        network.zero_grad()
        loss_of(network).backward()
        gradients.append([parameter.grad for parameter in network.parameters()])
    pairs = zip(*gradients, strict=True)
    return sum(one is None or other is None or not torch.equal(one, other) for one, other in pairs)


def _differing_buffers(options: dict[str, Any] | None) -> int:
    import torch
    from torch import nn

    from lightning_speedkit.memory import checkpoint_modules

    def block() -> nn.Module:
        return nn.Sequential(nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1))

    torch.manual_seed(0)
    plain = nn.Sequential(*(block() for _ in range(4)))
    model = copy.deepcopy(plain)
    if options is not None:
        checkpoint_modules(model, **options)
    for network in (plain, model):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            network(torch.randn(4, 8, 16)).square().mean().backward()
            optimizer.step()
    pairs = zip(plain.buffers(), model.buffers(), strict=True)
    return sum(not torch.equal(one, other) for one, other in pairs)


def main() -> None:
    """Measure and write the results."""
    options = benchmark_arguments("Memory and time of activation checkpointing.", 5)

    def variant(name: str, baseline: str | None = None, **arguments: Any) -> Variant:
        size = {"steps": 2, "depth": 2, "width": 32} if options.smoke else {"steps": 15}
        return Variant(name, _FUNCTION, {**size, **arguments}, baseline)

    selective: dict[str, Any] = {"policy": "selective"}
    batched = {**selective, "keep": ["matmul", "batched-matmul", "attention"]}
    attention = {**selective, "keep": ["batched-matmul", "aten.mm"]}  # on a CPU: its products, and its first projection
    fused = {"attention_dropout": False}
    run_benchmark(
        "activation_checkpointing",
        [
            variant("plain"),
            variant("full", options={}),
            variant("full, every second", options={"every": 2}),
            variant("selective", options=selective),
            variant("selective, attention kept", options=attention),
            variant("selective, batched-matmul too", options=batched),
            variant("selective, batched-matmul too, by torch's contexts", options=batched, by_torch=True),
            variant("fused attention: plain", "fused attention: plain", **fused),
            variant("fused attention: full", "fused attention: plain", options={}, **fused),
            variant("fused attention: selective", "fused attention: plain", options=selective, **fused),
        ],
        baseline="plain",
        rounds=options.rounds,
        warmup=options.warmup,
        forked=options.smoke,
        results=options.results,
    )


if __name__ == "__main__":
    main()

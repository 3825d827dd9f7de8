"""What recomputing blocks saves in memory and costs in time, on a small transformer.

Bytes are those that autograd keeps from the forward to the backward of one batch: distinct storages seen by
``saved_tensors_hooks``, parameters left out. Seconds are the median of a training step, forward to optimizer step.

    python -m benchmarks.activation_checkpointing [--rounds 5] [--smoke]
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from benchmarks.harness import Variant, benchmark_arguments, run_benchmark

_FUNCTION = "benchmarks.activation_checkpointing:measure"


def measure(steps: int, modules: list[str] | None = None, depth: int = 12, width: int = 128) -> dict[str, float]:
    """Train a transformer on random tokens, with the named modules checkpointed."""
    import torch
    from torch import nn

    from lightning_speedkit.memory import checkpoint_modules

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, depth, enable_nested_tensor=False), nn.Linear(width, 16))
    if modules is not None:
        checkpoint_modules(model, modules)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(16, 64, width)
    y = torch.randint(16, (16, 64))
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    saved = sum(kept.values())
    del loss

    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return {"saved_bytes": saved, "seconds_per_step": statistics.median(times[1:] or times)}


def main() -> None:
    """Measure and write the results."""
    options = benchmark_arguments("Memory and time of activation checkpointing.", 5)

    def variant(name: str, **arguments: Any) -> Variant:
        return Variant(name, _FUNCTION, {"steps": 2 if options.smoke else 15, **arguments})

    run_benchmark(
        "activation_checkpointing",
        [
            variant("plain"),
            variant("every block", modules=["TransformerEncoderLayer"]),
            variant("every second block", modules=[f"0.layers.{i}" for i in range(0, 12, 2)]),
        ],
        baseline="plain",
        rounds=options.rounds,
        warmup=options.warmup,
        forked=options.smoke,
        results=options.results,
    )


if __name__ == "__main__":
    main()

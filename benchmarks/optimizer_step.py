"""Seconds per step of each optimizer by name, on the weights of a small transformer, against torch's default AdamW.

Only the step is timed: the gradients stay the same, and no loss is computed. The state is what the optimizer keeps
between steps. ``adamw-8bit`` is in it where torchao is installed; it compiles its step, which the warm-up is for.

    python -m benchmarks.optimizer_step [--rounds 9] [--smoke]
"""

from __future__ import annotations

import importlib.util

from benchmarks.harness import Variant, benchmark_arguments, run_benchmark

_FUNCTION = "benchmarks.optimizer_step:measure"
_BASELINE = "torch.optim.AdamW"


def measure(steps: int, width: int, name: str | None) -> dict[str, float]:
    """The median seconds of one step, and the bytes of the state for each byte of the weights."""
    import statistics
    import time

    import torch
    from torch import nn

    from lightning_speedkit.optimize.optimizer import build_optimizer

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
    net = nn.Sequential(nn.Embedding(1000, width), nn.TransformerEncoder(layer, 4, enable_nested_tensor=False))
    net.append(nn.Linear(width, 1000))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net.to(device)
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter) / 100
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3) if name is None else build_optimizer(name, net, 1e-3)
    seconds = []
    for step in range(steps + 3):
        start = time.perf_counter()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        if step >= 3:  # the first ones make the state
            seconds.append(time.perf_counter() - start)
    weights = sum(p.numel() * p.element_size() for p in net.parameters())
    states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return {
        "seconds_per_step": statistics.median(seconds),
        "state_bytes_per_weight_byte": state_bytes(states) / weights,
    }


def state_bytes(tensors: list[object]) -> int:
    """Of tensors, and of those that a quantized tensor is made of."""
    total = 0
    for tensor in tensors:
        names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else []
        parts = [getattr(tensor, name) for name in names]
        total += state_bytes(parts) if parts else tensor.numel() * tensor.element_size()  # type: ignore[attr-defined]
    return total


def main() -> None:
    """Run it from the command line."""
    arguments = benchmark_arguments("Seconds per step of each optimizer.", rounds=9)
    names = ["adamw", "adam", "sgd-momentum", "adafactor", "schedule-free", "muon"]
    if importlib.util.find_spec("torchao") is not None:
        names.append("adamw-8bit")
    steps, width = (2, 32) if arguments.smoke else (50, 128)

    def settings(name: str | None) -> dict[str, object]:
        # Muon's matrix products in bfloat16 take seconds on many CPUs
        return {"steps": max(2, steps // 10) if name == "muon" else steps, "width": width, "name": name}

    run_benchmark(
        "optimizer_step",
        [Variant(_BASELINE, _FUNCTION, settings(None)), *(Variant(name, _FUNCTION, settings(name)) for name in names)],
        baseline=_BASELINE,
        rounds=arguments.rounds,
        warmup=arguments.warmup,
        results=arguments.results,
    )


if __name__ == "__main__":
    main()

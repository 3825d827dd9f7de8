"""Seconds per step of each optimizer by name, against torch's own ``torch.optim.AdamW(net.parameters(), lr=1e-3)``.

Only the step is timed, on one thread: the gradients stay the same, and no loss is computed. The model, its weights and
its gradients are those of the variant that it is held against. Fused AdamW is measured on three models: 159 tensors of
0.13 MB at most, a transformer of 51 tensors and 1 million weights, and 4 tensors with 8 million weights; the others on
the transformer. All run in one process, one after another, forwards in one round and backwards in the next, so that a
pair lies within a second or two. The state is what the optimizer keeps between steps. ``adamw-8bit`` is in it where
torchao is installed; it compiles its step, which the warm-up is for.

    python -m benchmarks.optimizer_step [--rounds 15] [--smoke]
"""

from __future__ import annotations

import importlib.util

from benchmarks.harness import Variant, benchmark_arguments, run_benchmark

_FUNCTION = "benchmarks.optimizer_step:measure"
_BASELINE = "torch.optim.AdamW"
_TRANSFORMER = "transformer"
# how many layers (0: two matrices and no more), how wide, and how many steps
_MODELS = {"many small tensors": (13, 32, 30), _TRANSFORMER: (4, 128, 30), "few large tensors": (0, 2048, 6)}
_NAMES = ("adam", "sgd-momentum", "adafactor", "schedule-free", "muon")


def measure(steps: int, layers: int, width: int, name: str | None) -> dict[str, float]:
    """The median seconds of one step, and the bytes of the state for each byte of the weights."""
    import statistics
    import time

    import torch
    from torch import nn

    from lightning_speedkit.optimize.optimizer import build_optimizer

    torch.manual_seed(0)
    if layers:
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        net = nn.Sequential(nn.Embedding(1000, width), nn.TransformerEncoder(layer, layers, enable_nested_tensor=False))
        net.append(nn.Linear(width, 1000))
    else:
        net = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net.to(device)
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter) / 100
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3) if name is None else build_optimizer(name, net, lr=1e-3)
    seconds = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for step in range(steps + 3):
            start = time.perf_counter()
            optimizer.step()
            if device == "cuda":
                torch.cuda.synchronize()
            if step >= 3:  # the first ones make the state
                seconds.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
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


def variants(smoke: bool = False) -> list[Variant]:
    """torch's default and the fused one on each model, and the other optimizers on one of them."""

    def variant(name: str | None, model: str) -> Variant:
        layers, width, steps = _MODELS[model]
        if name == "muon":
            steps = 2  # its matrix products in bfloat16 take seconds on many CPUs
        told = {"steps": 2 if smoke else steps, "layers": layers, "width": 32 if smoke else width, "name": name}
        return Variant(f"{name or _BASELINE}, {model}", _FUNCTION, told, baseline=f"{_BASELINE}, {model}")

    names = [*_NAMES, *(["adamw-8bit"] if importlib.util.find_spec("torchao") is not None else [])]
    pairs = [variant(name, model) for model in _MODELS for name in (None, "adamw")]
    return [*pairs, *(variant(name, _TRANSFORMER) for name in names)]


def main() -> None:
    """Run it from the command line."""
    arguments = benchmark_arguments("Seconds per step of each optimizer.", rounds=15)
    run_benchmark(
        "optimizer_step",
        variants(arguments.smoke),
        rounds=arguments.rounds,
        warmup=arguments.warmup,
        in_process=True,
        results=arguments.results,
    )


if __name__ == "__main__":
    main()

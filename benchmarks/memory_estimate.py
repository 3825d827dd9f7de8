"""How close ``estimate_memory`` comes to what a real training step takes, on five kinds of models.

The estimate is made without data. What is measured is the memory of the process, as the kernel counts it: the most that
was resident in two training steps, beyond what was before the model was made; every variant runs in a fresh process, in
which the libraries have been warmed up by a small model. ``ratio`` is predicted over measured.

    python -m benchmarks.memory_estimate [--rounds 3] [--smoke]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.data.bars import Bar, held_against
from benchmarks.harness import Variant, benchmark_arguments, run_benchmark

_FUNCTION = "benchmarks.memory_estimate:measure"
_MIB = 1 << 20


def measure(kind: str, precision: str, checkpoint: bool, small: bool = False) -> dict[str, float]:
    """Predict the peak of a training step with AdamW, then take the steps."""
    import gc

    import torch

    from lightning_speedkit.memory import checkpoint_modules
    from lightning_speedkit.memory.memory_estimate import estimate_memory

    torch.manual_seed(0)
    _two_steps(*_MODELS[kind](True), precision)
    gc.collect()
    before = _resident("VmRSS")
    model, batch = _MODELS[kind](small)
    if checkpoint:
        checkpoint_modules(model)
    predicted = estimate_memory(model, batch, precision).peak_bytes
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    _two_steps(model, batch, precision)
    measured = _resident("VmHWM") - before
    return {
        "predicted_mib": predicted / _MIB,
        "measured_mib": measured / _MIB,
        "predicted_over_measured": predicted / measured,
    }


def _two_steps(model: Any, batch: Any, precision: str) -> None:
    import contextlib

    import torch

    if precision.endswith("-true") and precision != "32-true":
        model.bfloat16()
        batch = batch.bfloat16()
    autocast = torch.autocast("cpu", torch.bfloat16) if precision == "bf16-mixed" else contextlib.nullcontext()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        with autocast:
            output = model(batch)
            output = output[0] if isinstance(output, tuple) else output
            loss = output.float().mean()
            del output
        loss.backward()
        optimizer.step()


def _resident(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def _resnet(small: bool) -> tuple[Any, Any]:
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x + self.body(x))

    depth, size, count = (1, 16, 2) if small else (6, 64, 32)
    blocks = nn.Sequential(*(Block(64) for _ in range(depth)))
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
    )
    return model, torch.randn(count, 3, size, size)


def _transformer(small: bool) -> tuple[Any, Any]:
    import torch
    from torch import nn

    depth, count = (2, 2) if small else (8, 64)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.1, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, depth, enable_nested_tensor=False), nn.Linear(256, 16))
    return model, torch.randn(count, 64, 256)


def _mlp(small: bool) -> tuple[Any, Any]:
    import torch
    from torch import nn

    width, count = (64, 4) if small else (2048, 256)
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(count, width)


def _lstm(small: bool) -> tuple[Any, Any]:
    import torch
    from torch import nn

    width, length, count = (16, 4, 2) if small else (384, 64, 64)
    return nn.LSTM(width, width, num_layers=2, batch_first=True), torch.randn(count, length, width)


def _unet(small: bool) -> tuple[Any, Any]:
    import torch
    from torch import nn

    def double(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        )

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.bottom = double(3, 32), double(32, 64), double(64, 128)
            self.up_second, self.up_first = double(128 + 64, 64), double(64 + 32, 32)
            self.head = nn.Conv2d(32, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = self.first(x)
            second = self.second(nn.functional.max_pool2d(first, 2))
            bottom = self.bottom(nn.functional.max_pool2d(second, 2))
            up = self.up_second(torch.cat([nn.functional.interpolate(bottom, scale_factor=2), second], 1))
            return self.head(self.up_first(torch.cat([nn.functional.interpolate(up, scale_factor=2), first], 1)))

    size, count = (16, 1) if small else (128, 24)
    return UNet(), torch.randn(count, 3, size, size)


_MODELS = {"ResNet": _resnet, "transformer": _transformer, "MLP": _mlp, "LSTM": _lstm, "U-Net": _unet}
_CASES = [
    ("ResNet", "32-true", False),
    ("ResNet", "bf16-mixed", False),
    ("ResNet", "32-true", True),
    ("transformer", "32-true", False),
    ("transformer", "bf16-mixed", False),
    ("transformer", "32-true", True),
    ("MLP", "32-true", False),
    ("MLP", "bf16-true", False),
    ("LSTM", "32-true", False),
    ("U-Net", "32-true", False),
    ("U-Net", "bf16-mixed", False),
]


def main() -> None:
    """Run it, and say of each variant whether the estimate is within a tenth."""
    arguments = benchmark_arguments(__doc__, rounds=3)
    variants = [
        Variant(
            f"{kind}, {precision}{', checkpointed' if checkpoint else ''}",
            _FUNCTION,
            {"kind": kind, "precision": precision, "checkpoint": checkpoint, "small": arguments.smoke},
        )
        for kind, precision, checkpoint in (_CASES[:1] if arguments.smoke else _CASES)
    ]
    # A fixed threshold gives freed tensors back to the system at once, so that they are not counted twice.
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_TOP_PAD_": "0"}
    result = run_benchmark(
        "memory_estimate",
        variants,
        rounds=arguments.rounds,
        warmup=0,
        environment=environment,
        results=arguments.results,
        forked=arguments.smoke,
    )
    bars = [Bar(one.name, one.name, metric="predicted_over_measured", least=0.9, most=1.1) for one in variants]
    held_against(result, bars, Path(arguments.results))


if __name__ == "__main__":
    main()

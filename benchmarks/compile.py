"""What torch.compile and channels-last gain, and what compiling costs, for a small convolutional net and a transformer.

Each variant runs in a process of its own, with a cache of compiled code of its own, which is empty. Training is a
``Trainer`` with and without the callback: the median of a step in which nothing was compiled. The forward is without
gradients and in eval mode, through ``compile_modules``. ``compile_seconds`` is the time in which the process waited for
the compiler, and ``break_even_steps`` that time over what a step gains; it is left out where a step gains nothing.

    python -m benchmarks.compile [--rounds 5] [--smoke]
"""

from __future__ import annotations

import functools
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks.harness import Variant, benchmark_arguments, run_benchmark

_TRAIN, _FORWARD = "benchmarks.compile:train", "benchmarks.compile:forward"


def _with_an_empty_cache(function: Callable[..., dict[str, float]]) -> Callable[..., dict[str, float]]:
    @functools.wraps(function)
    def call(**arguments: Any) -> dict[str, float]:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            os.environ.update(TORCHINDUCTOR_CACHE_DIR=folder, TORCHINDUCTOR_FX_GRAPH_CACHE="0")
            return function(**arguments)

    return call


@_with_an_empty_cache
def train(
    steps: int, net: str, compiled: bool = False, last: bool = False, backend: str = "inductor", rows: int | None = None
) -> dict[str, float]:
    """Train on random batches of ``rows``; the median seconds of a step, and what the callback reports."""
    from lightning.pytorch import Callback, LightningModule, Trainer
    from torch import Tensor, nn, optim
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_speedkit.precision.channels_last import ChannelsLast
    from lightning_speedkit.precision.compile import CompileModel

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _net(net)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> optim.Optimizer:
            return optim.SGD(self.parameters(), lr=0.01)

    class Timer(Callback):
        def __init__(self) -> None:
            self.began = 0.0
            self.seconds: list[float] = []

        def on_train_batch_start(self, *_: Any) -> None:
            self.began = time.perf_counter()

        def on_train_batch_end(self, *_: Any) -> None:
            self.seconds.append(time.perf_counter() - self.began)

    eager = min(10, steps // 2)
    timer, compiling = Timer(), CompileModel(backend=backend, eager_steps=eager)
    callbacks = [timer, *([ChannelsLast()] if last else []), *([compiling] if compiled else [])]
    rows = rows or _BATCH[net]
    x, y = _data(net, steps, rows)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(max_epochs=1, callbacks=callbacks, accelerator="cpu", enable_model_summary=False, **quiet)
    trainer.fit(Module(), DataLoader(TensorDataset(x, y), batch_size=rows))
    told = {"step_seconds": statistics.median(timer.seconds[eager + 1 :] or timer.seconds)}
    report = compiling.report
    if report is not None:
        if report.failures:
            raise RuntimeError(report.failures[0][1])
        told["compile_seconds"] = report.compile_seconds
        if report.break_even_step is not None:
            told["break_even_steps"] = float(report.break_even_step)
    return told


@_with_an_empty_cache
def forward(
    calls: int, net: str, compiled: bool = False, last: bool = False, backend: str = "inductor", rows: int | None = None
) -> dict[str, float]:
    """Forward passes in eval mode, without gradients; the median seconds of a call."""
    import torch

    from lightning_speedkit.precision.channels_last import to_channels_last_
    from lightning_speedkit.precision.compile import compile_modules
    from lightning_speedkit.precision.compiled_call import CompileLog

    model, (x, _), log = _net(net).eval(), _data(net, 1, rows or _BATCH[net]), CompileLog()
    if last:
        to_channels_last_(model)
        x = x.contiguous(memory_format=torch.channels_last)
    if compiled:
        compile_modules(model, backend=backend, log=log)
    seconds = []
    with torch.inference_mode():
        for _ in range(calls + 2):
            start = time.perf_counter()
            model(x)
            seconds.append(time.perf_counter() - start)
    if log.failures:
        raise RuntimeError(next(iter(log.failures.values())))
    told = {"forward_seconds": statistics.median(seconds[2:])}
    return {**told, "compile_seconds": log.seconds} if compiled else told


_BATCH = {"conv": 32, "transformer": 16}


def _net(name: str) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    if name == "conv":
        widths, layers = (3, 32, 64, 64, 128), []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.SiLU()]
            layers += [nn.AvgPool2d(2)]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(128), nn.LayerNorm(128)
            self.mix = nn.Linear(128, 384)
            self.out = nn.Linear(128, 128)
            self.wide = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.mix(self.first(x)).unflatten(-1, (3, 4, 32)).transpose(1, 3).unbind(2)
            attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(attended.transpose(1, 2).flatten(2))
            return x + self.wide(self.second(x))

    class Mean(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean(1)

    return nn.Sequential(*(Block() for _ in range(4)), Mean(), nn.Linear(128, 10))


def _data(net: str, batches: int, rows: int) -> Any:
    import torch

    size = (3, 32, 32) if net == "conv" else (64, 128)
    x = torch.randn(rows, *size).repeat(batches, *(1 for _ in size))
    return x, torch.randint(10, (rows,)).repeat(batches)


def main() -> None:
    """Measure and write the results."""
    options = benchmark_arguments("What torch.compile and channels-last gain and cost.", 5)
    backend = {"backend": "eager"} if options.smoke else {}
    small = {"rows": 2} if options.smoke else {}
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "compiled": {"compiled": True, **backend},
        "channels-last": {"last": True},
        "both": {"compiled": True, "last": True, **backend},
    }
    variants = []
    for function, kind, count in ((_TRAIN, "training", "steps"), (_FORWARD, "forward", "calls")):
        many = 4 if options.smoke else 60
        for net in ("conv", "transformer"):
            for way, arguments in ways.items():
                if net == "conv" or "last" not in arguments:
                    name = f"{net} {kind}, {way}"
                    asked = {count: many, "net": net, **arguments, **small}
                    variants.append(Variant(name, function, asked, f"{net} {kind}, plain"))
    run_benchmark(
        "compile",
        variants,
        rounds=options.rounds,
        warmup=options.warmup,
        forked=options.smoke,
        results=options.results,
    )


if __name__ == "__main__":
    main()

"""The share of a training step in which a stage of the pipeline is idle, against the formula.

Each stage sleeps as long as the others in forward and in backward, so two stages need no two cores. The formula is
``(p - 1) / (v * m + p - 1)`` for p processes, m micro-batches and v stages per process.

    python -m benchmarks.pipeline_bubble [--rounds 3] [--smoke]
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import time
from typing import Any

import torch
import torch.multiprocessing
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness import Variant, benchmark_arguments, run_benchmark
from lightning_speedkit.parallel import PipelineStrategy

PROCESSES = 2


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Sleeping(nn.Module):
    """A layer that takes as long in its backward as in its forward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(1, 1), seconds

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = _Sleep.apply(self.linear(value), self.seconds)
        return result


class Sleeper(LightningModule):
    """A chain of such layers."""

    def __init__(self, stages: int, seconds: float) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Sleeping(seconds) for _ in range(stages)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class _Clock(Callback):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)


def measure(schedule: str, microbatches: int, seconds: float, steps: int) -> dict[str, float]:
    """The idle share of a step, what the formula says, and one by the other."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    per_rank = 2 if schedule == "interleaved" else 1
    context = multiprocessing.get_context("spawn")
    told = context.SimpleQueue()
    arguments = (port, told, schedule, per_rank * PROCESSES, microbatches, seconds, steps)
    torch.multiprocessing.spawn(_rank, arguments, nprocs=PROCESSES)  # type: ignore[no-untyped-call]
    step = statistics.median(told.get())
    busy = per_rank * microbatches * 2 * seconds
    formula = (PROCESSES - 1) / (per_rank * microbatches + PROCESSES - 1)
    share = 1 - busy / step
    return {"bubble_share": share, "formula_share": formula, "share_by_formula": share / formula}


def _rank(rank: int, port: int, told: Any, schedule: str, stages: int, microbatches: int, *length: Any) -> None:
    """Trains a chain that sleeps; rank 0 tells the seconds of the steps after the first two."""
    seconds, steps = length
    os.environ |= {"WORLD_SIZE": str(PROCESSES), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"NODE_RANK": "0", "LOCAL_RANK": str(rank), "RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
    clock, strategy = _Clock(), PipelineStrategy("net", microbatches=microbatches, schedule=schedule)  # type: ignore[arg-type]
    data = DataLoader(TensorDataset(torch.ones(steps * microbatches, 1)), batch_size=microbatches)
    Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=PROCESSES,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        callbacks=clock,
    ).fit(Sleeper(stages, seconds), data)
    if rank == 0:
        told.put(clock.seconds[2:])


def main() -> None:
    """Measure and write the results."""
    options = benchmark_arguments("The idle share of a pipeline's training step.", 3)
    length = {"seconds": 0.002, "steps": 3} if options.smoke else {"seconds": 0.25, "steps": 5}
    counts = (4,) if options.smoke else (2, 4, 8)
    variants = [
        Variant(f"{schedule}, {count} micro-batches", "benchmarks.pipeline_bubble:measure", arguments)
        for schedule in ("gpipe", "1f1b", "interleaved")
        for count in counts
        for arguments in [{"schedule": schedule, "microbatches": count, **length}]
    ]
    run_benchmark(
        "pipeline_bubble",
        variants,
        rounds=options.rounds,
        warmup=0,
        timeout=240,
        results=options.results,
        forked=options.smoke,
    )


if __name__ == "__main__":
    main()

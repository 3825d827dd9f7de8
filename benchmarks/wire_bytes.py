"""What data parallel training sends per step, with each communication hook, and what that does to the loss.

The bytes are counted in the collectives that a hook calls, on two processes joined by gloo. Steps before PowerSGD
begins are trained and not counted.

    python -m benchmarks.wire_bytes [--rounds 3] [--smoke]
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import socket
from typing import Any

import torch
import torch.multiprocessing
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness import Variant, benchmark_arguments, run_benchmark
from lightning_speedkit.parallel import SpeedkitDDPStrategy

PROCESSES, WHOLE_STEPS, ROWS = 2, 10, 32


class Perceptron(LightningModule):
    """Learns what another network with random weights answers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = nn.Sequential(
            nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()
        ).append(nn.Linear(256, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class _Count(Callback):
    """The bytes that the collectives of the hook are given, in the steps after the first ones."""

    def __init__(self, plain: bool) -> None:
        self.plain, self.bytes, self.steps = plain, 0, 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self.plain:  # the same as no hook, but called from Python, where it can be counted
            trainer.strategy.model.register_comm_hook(None, default_hooks.allreduce_hook)
        self.all_reduce = torch.distributed.all_reduce

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        if trainer.global_step < WHOLE_STEPS:
            return
        self.steps += 1

        @functools.wraps(self.all_reduce)
        def counted(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
            self.bytes += tensor.numel() * tensor.element_size()
            return self.all_reduce(tensor, *arguments, **options)

        torch.distributed.all_reduce = counted

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        torch.distributed.all_reduce = self.all_reduce


def measure(hook: str | None, rank: int, steps: int) -> dict[str, float]:
    """Bytes per step, the share of what the gradients are, and the loss on other data at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    told = multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(_rank, (port, told, hook, rank, steps), nprocs=PROCESSES)  # type: ignore[no-untyped-call]
    found: dict[str, float] = told.get()
    return found


def _data(steps: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(steps * ROWS * PROCESSES + 1024, 64, generator=generator)
    inner, outer = torch.randn(64, 32, generator=generator) / 8, torch.randn(32, 10, generator=generator) / 6
    return x, torch.tanh(x @ inner) @ outer


def _rank(process: int, port: int, told: Any, hook: Any, rank: int, steps: int) -> None:
    os.environ |= {"WORLD_SIZE": str(PROCESSES), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"NODE_RANK": "0", "LOCAL_RANK": str(process), "RANK": str(process), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    count, (x, y), model = _Count(hook is None), _data(steps), Perceptron()
    mine, other = slice(process, -1024, PROCESSES), slice(-1024, None)
    strategy = SpeedkitDDPStrategy(comm_hook=hook, powersgd_rank=rank, powersgd_start_step=WHOLE_STEPS)
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
        callbacks=count,
    ).fit(model, DataLoader(TensorDataset(x[mine], y[mine]), batch_size=ROWS))
    if process == 0:
        sent, gradients = count.bytes / count.steps, 4 * sum(p.numel() for p in model.parameters())
        with torch.no_grad():
            loss = nn.functional.mse_loss(model.net(x[other]), y[other]).item()
        told.put({"sent_bytes_per_step": sent, "share_of_gradients": sent / gradients, "loss": loss})


def main() -> None:
    """Measure and write the results."""
    options = benchmark_arguments("What the gradients are sent as, and what it does to the loss.", 3)
    steps = WHOLE_STEPS + (3 if options.smoke else 190)
    hooks = [("whole", None, 2), ("fp16", "fp16", 2), ("bf16", "bf16", 2)]
    hooks += [(f"PowerSGD, rank {rank}", "powersgd", rank) for rank in (1, 2, 4)]
    variants = [
        Variant(name, "benchmarks.wire_bytes:measure", {"hook": hook, "rank": rank, "steps": steps})
        for name, hook, rank in hooks
    ]
    run_benchmark(
        "wire_bytes",
        variants,
        baseline="whole",
        rounds=options.rounds,
        warmup=0,
        timeout=240,
        results=options.results,
        forked=options.smoke,
    )


if __name__ == "__main__":
    main()

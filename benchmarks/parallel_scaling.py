"""Data parallel training on two processes against one, and against the formulas that ``suggest_strategy`` plans with.

In one run the two ranks train a perceptron one after the other: rank 0 by itself, both without and both with gradients
sent, and both with rank 1 late. Seconds of a step are predicted from the computing and an all-reduce by themselves, by
``cost_model.step_seconds``; bytes are those that the process wrote, which Linux counts. The efficiency is the rate of
two processes by twice the rate of one. ``cores_per_rank`` are the CPU seconds per second that a rank got while both
computed, ``cores_of_one`` those of the one by itself; ``efficiency_by_cores`` is what the efficiency would be if they
were alike.

    python -m benchmarks.parallel_scaling [--rounds 3] [--smoke]
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import Variant, benchmark_arguments, run_benchmark
from lightning_speedkit.parallel import register_comm_hook
from lightning_speedkit.parallel.cost_model import ddp_bytes, step_seconds

PROCESSES = 2
_BACKWARD = 2 / 3  # of the computing of a step


def measure(rows: int, width: int, hook: str | None, late_share: float, steps: int) -> dict[str, float]:
    """Efficiency, seconds and bytes of a step, and each by its formula. Rank 1 is late by a share of its computing."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    told = multiprocessing.get_context("spawn").SimpleQueue()
    arguments = (port, told, rows, width, hook, late_share, steps)
    torch.multiprocessing.spawn(_rank, arguments, nprocs=PROCESSES)  # type: ignore[no-untyped-call]
    metrics: dict[str, float] = told.get()
    return metrics


def _rank(rank: int, port: int, told: Any, rows: int, width: int, hook: str | None, late: float, steps: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=PROCESSES)
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    if hook is not None:
        register_comm_hook(model, hook)
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.01), torch.randn(rows, width)
    gradients = [p for p in net.parameters() if p.requires_grad]
    gradient_bytes = sum(p.nbytes for p in gradients)
    buffer = torch.zeros(gradient_bytes // (8 if hook == "fp16" else 4), dtype=torch.float32)

    def step(context: Callable[[], AbstractContextManager[Any]] = nullcontext, seconds: float = 0.0) -> None:
        time.sleep(seconds)
        with context():
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    alone = _timed(lambda: step(model.no_sync), steps) if rank == 0 else None  # the other waits at the barrier
    dist.barrier()
    compute, cores = _timed(lambda: step(model.no_sync), steps)
    reduce, _ = _timed(lambda: dist.all_reduce(buffer), steps)
    before = _written_bytes()
    together, _ = _timed(step, steps)
    sent = (_written_bytes() - before) / steps
    wait = late * compute
    delayed, _ = _timed(lambda: step(seconds=wait if rank == 1 else 0.0), steps)
    ranks: list[Any] = [None] * PROCESSES
    dist.all_gather_object(ranks, (compute, reduce, together, cores, wait))
    if rank == 0:
        assert alone is not None
        slowest, network, step_measured = (max(entry[i] for entry in ranks) for i in range(3))
        hidden = step_seconds(slowest, 0.0, network, hideable=_BACKWARD)
        cores_per_rank = statistics.mean(entry[3] for entry in ranks)
        formula = ddp_bytes(PROCESSES, buffer.nbytes)
        told.put(
            {
                "efficiency": alone[0] / step_measured,
                "efficiency_by_cores": alone[0] * alone[1] / (step_measured * cores_per_rank),
                "cores_of_one": alone[1],
                "cores_per_rank": cores_per_rank,
                "seconds_of_one": alone[0],
                "compute_seconds": slowest,
                "all_reduce_seconds": network,
                "step_seconds": step_measured,
                "measured_by_hidden": step_measured / hidden,
                "measured_by_exposed": step_measured / step_seconds(slowest, network, 0.0, hideable=0.0),
                "sent_bytes": sent,
                "sent_by_formula": sent / formula,
                "late_by_formula": delayed / (step_measured + ranks[1][4]),
            }
        )
    dist.destroy_process_group()


def _timed(run: Callable[[], object], steps: int) -> tuple[float, float]:
    """Median seconds, and CPU seconds of this process per second."""
    seconds = []
    start, used = time.perf_counter(), time.process_time()
    for _ in range(steps):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    cores = (time.process_time() - used) / (time.perf_counter() - start)
    return statistics.median(seconds), cores


def _written_bytes() -> int:
    """What this process wrote so far, to sockets too; 0 where the system does not count it."""
    counters = Path("/proc/self/io")
    if not counters.exists():
        return 0
    return int(dict(line.split(": ") for line in counters.read_text().splitlines())["wchar"])


def main() -> None:
    """Measure and write the results."""
    options = benchmark_arguments("Data parallel on two processes against one, and against formulas.", 3)
    steps = 3 if options.smoke else 20
    width = 64 if options.smoke else 768
    sizes: dict[str, dict[str, Any]] = {
        "much computing": {"rows": 256, "hook": None},
        "much traffic": {"rows": 16, "hook": None},
        "much traffic, fp16 hook": {"rows": 16, "hook": "fp16"},
    }
    variants = [
        Variant(
            name, "benchmarks.parallel_scaling:measure", {**size, "width": width, "late_share": 0.5, "steps": steps}
        )
        for name, size in sizes.items()
    ]
    run_benchmark(
        "parallel_scaling",
        variants,
        rounds=options.rounds,
        warmup=0,
        timeout=120,
        higher_is_better=["efficiency", "efficiency_by_cores", "cores_of_one", "cores_per_rank"],
        results=options.results,
        forked=options.smoke,
    )


if __name__ == "__main__":
    main()

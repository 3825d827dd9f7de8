"""The formulas, against published numbers, sums worked out by hand, and what must grow when something grows."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from lightning_speedkit.parallel import cost_model
from lightning_speedkit.parallel.cost_model import (
    all_gather_bytes,
    all_reduce_bytes,
    compute_seconds,
    ddp_bytes,
    fsdp_bytes,
    model_state_bytes,
    pipeline_bubble,
    pipeline_bytes,
    reduce_scatter_bytes,
    ring_seconds,
    step_seconds,
    tensor_parallel_activation_share,
    tensor_parallel_bytes,
    zero_bytes,
)
from tests.two_ranks import on_ranks

RANKS = st.integers(1, 4096)
BYTES = st.floats(0, 1e15)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_figure_1_of_the_zero_paper(stage: int, gigabytes: float) -> None:
    assert round(zero_bytes(7.5e9, 64, stage) / 1e9, 1) == gigabytes


def test_lightnings_mixed_precision_with_adam_takes_zeros_16_bytes_too() -> None:
    assert model_state_bytes(4 * 7.5e9, 4 * 7.5e9) == zero_bytes(7.5e9) == 120e9
    assert model_state_bytes(4 * 7.5e9, 4 * 7.5e9, shards=64) == zero_bytes(7.5e9, 64, 3) == 1.875e9
    assert model_state_bytes(100, 40, optimizer_states=0) == 140  # frozen ones have no gradient


def _sent_by_a_simulated_ring(ranks: int, rounds: int) -> int:
    """What rank 0 sends of a tensor of one byte per rank: one part in each of the rounds."""
    return sum(1 for _ in range(rounds * (ranks - 1)))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
def test_a_ring_counted_message_by_message(ranks: int) -> None:
    assert all_gather_bytes(ranks, ranks) == pytest.approx(_sent_by_a_simulated_ring(ranks, 1))
    assert all_reduce_bytes(ranks, ranks) == pytest.approx(_sent_by_a_simulated_ring(ranks, 2))
    assert fsdp_bytes(ranks, ranks, ranks) == pytest.approx(_sent_by_a_simulated_ring(ranks, 3))


def test_sums_by_hand() -> None:
    assert ddp_bytes(8, 4e9) == 7e9  # 2 * 7/8 * 4 GB
    assert fsdp_bytes(8, 4e9, 4e9) == 10.5e9  # 3 * 7/8 * 4 GB
    assert fsdp_bytes(8, 4e9, 4e9, gathers=1) == 7e9
    assert tensor_parallel_bytes(4, 24, 1e6) == 144e6  # 4 * 24 * 2 * 3/4 * 1 MB
    assert pipeline_bytes(3, 5) == 10
    assert pipeline_bubble(4, 4) == 3 / 7
    assert compute_seconds(6e15, 8, flops_per_second=300e12, utilization=0.5) == 5.0
    assert ring_seconds(1e9, 14, bytes_per_second=10e9, latency_seconds=1e-3, rings=8) == pytest.approx(0.814)
    assert step_seconds(3.0, 0.5, 1.0, hideable=2 / 3) == 3.5  # hidden behind the two seconds of the backward


def test_korthikantis_block_of_34_bytes_per_element() -> None:
    assert 34 * tensor_parallel_activation_share(4) == 10 + 24 / 4


@given(RANKS, BYTES)
def test_sharding_fully_sends_half_as_much_again(ranks: int, size: float) -> None:
    assert fsdp_bytes(ranks, size, size) == pytest.approx(1.5 * ddp_bytes(ranks, size))
    assert all_reduce_bytes(ranks, size) == all_gather_bytes(ranks, size) + reduce_scatter_bytes(ranks, size)


@given(RANKS, st.integers(1, 100), BYTES, st.floats(0, 1e15))
def test_more_ranks_and_more_bytes_send_more_and_never_twice_the_tensor(
    ranks: int, more: int, size: float, extra: float
) -> None:
    assert all_reduce_bytes(1, size) == 0
    assert all_reduce_bytes(ranks, size) <= all_reduce_bytes(ranks + more, size) <= 2 * size
    assert all_reduce_bytes(ranks, size) <= all_reduce_bytes(ranks, size + extra)


@given(st.integers(1, 10**12), RANKS, st.integers(1, 100), st.integers(0, 2))
def test_more_shards_and_a_higher_stage_never_need_more_memory(n: int, ranks: int, more: int, stage: int) -> None:
    assert zero_bytes(n, ranks + more, stage) <= zero_bytes(n, ranks, stage) <= 16 * n
    assert zero_bytes(n, ranks, stage + 1) <= zero_bytes(n, ranks, stage)
    assert zero_bytes(n, ranks, 3) == pytest.approx(16 * n / ranks)


@given(st.integers(1, 512), st.integers(1, 512), st.integers(1, 64))
def test_the_bubble_shrinks_with_micro_batches_and_grows_with_stages(stages: int, micro: int, more: int) -> None:
    bubble = pipeline_bubble(stages, micro)
    assert 0 <= bubble < 1
    assert pipeline_bubble(stages, micro + more) <= bubble <= pipeline_bubble(stages + more, micro)
    # in slots: m of work in a step of m + p - 1
    assert 1 / (1 - bubble) == pytest.approx((micro + stages - 1) / micro)


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1))
def test_a_step_is_never_shorter_than_computing_nor_longer_than_all_in_turn(
    compute: float, exposed: float, hidden: float, hideable: float
) -> None:
    seconds = step_seconds(compute, exposed, hidden, hideable=hideable)
    assert compute + exposed <= seconds <= compute + exposed + hidden + 1e-9 * (1 + compute + exposed + hidden)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: all_reduce_bytes(0, 1), "ranks=0 must be at least 1"),
        (lambda: all_reduce_bytes(2, -1), "size=-1 must be 0 or more and finite"),
        (lambda: all_reduce_bytes(2, math.nan), "size=nan must be"),
        (lambda: all_reduce_bytes(2, math.inf), "size=inf must be"),
        (lambda: zero_bytes(1, 1, 4), "stage=4 must be 0, 1, 2 or 3"),
        (lambda: pipeline_bubble(2, 0), "micro_batches=0 must be at least 1"),
        (lambda: ring_seconds(1, 1, bytes_per_second=0, latency_seconds=0), "bytes_per_second=0 must be above 0"),
        (lambda: compute_seconds(1, 1, flops_per_second=1, utilization=1.5), "utilization=1.5 up to 1"),
        (lambda: compute_seconds(1, 1, flops_per_second=0, utilization=1), "flops_per_second=0 must be above 0"),
        (lambda: step_seconds(1, 0, 0, hideable=1, bubble=1), "bubble=1 must be from 0 to below 1"),
    ],
)
def test_numbers_that_make_no_sense(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_counts_are_whole() -> None:
    with pytest.raises(TypeError, match="ranks=True must be a whole number"):
        all_reduce_bytes(True, 1)


def test_every_formula_is_public() -> None:
    public = {name for name, value in vars(cost_model).items() if callable(value) and not name.startswith("_")}
    assert set(cost_model.__all__) == public


def _written_bytes() -> int:
    """What this process wrote so far, to sockets too: Linux counts it."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["wchar"])


def _sent_in_a_step(way: str) -> tuple[int, int, int]:
    """Bytes that a rank wrote in the second step, those of the parameters, and those of the activations."""
    dist.init_process_group("gloo")
    net = nn.Sequential(*(nn.Linear(240, 240, bias=False) for _ in range(4)))
    size, x = sum(4 * p.numel() for p in net.parameters()), torch.randn(360, 240, requires_grad=True)
    model: Any = net
    if way == "ddp":
        model = nn.parallel.DistributedDataParallel(net)
    elif way == "tensor parallel":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        styles: dict[str, ParallelStyle] = {
            f"{i}": ColwiseParallel() if i % 2 == 0 else RowwiseParallel() for i in range(4)
        }
        parallelize_module(net, mesh, styles)
    else:
        for layer in net:
            fully_shard(layer)
        fully_shard(net)
    sent = 0
    for _ in range(2):
        dist.barrier()
        before = _written_bytes()
        model(x).sum().backward()
        dist.barrier()
        sent = _written_bytes() - before
    del model, net  # DDP's reducer may wait for ever for a group that is gone
    dist.destroy_process_group()
    return sent, size, 4 * x.numel()


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the system does not count what a process writes")
@pytest.mark.parametrize("ranks", [2, 3])
def test_bytes_on_the_wire_of_data_parallel_and_sharding_and_tensor_parallel(ranks: int) -> None:
    for way in ("ddp", "fsdp", "tensor parallel"):
        for sent, size, activations in on_ranks(ranks, _sent_in_a_step, way, timeout=60):
            expected = {
                "ddp": ddp_bytes(ranks, size),
                # gloo scatters a sum by an all-reduce, so that it sends (n-1)/n more than the formula
                "fsdp": fsdp_bytes(ranks, size, size) + all_gather_bytes(ranks, size),
                # 2 pairs of layers, as in a transformer block: 4 all-reduces
                "tensor parallel": tensor_parallel_bytes(ranks, 1, activations),
            }[way]
            assert expected <= sent <= 1.02 * expected + 4000, way


@pytest.mark.parametrize(("name", "states"), [("SGD", 0), ("momentum", 1), ("Adam", 2), ("AdamW", 2), ("Adagrad", 1)])
def test_state_bytes_of_a_real_optimizer(name: str, states: int) -> None:
    layer = nn.Linear(300, 200, bias=False)
    options: dict[str, Any] = {"momentum": 0.9} if name == "momentum" else {}
    optimizer = getattr(torch.optim, "SGD" if name == "momentum" else name)(layer.parameters(), lr=0.1, **options)
    layer(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    assert layer.weight.grad is not None
    held = [layer.weight, layer.weight.grad, *(v for v in optimizer.state[layer.weight].values() if v is not None)]
    real = sum(t.nbytes for t in held if isinstance(t, Tensor) and t.numel() > 1)
    assert model_state_bytes(4 * 60_000, 4 * 60_000, optimizer_states=states) == real == (2 + states) * 4 * 60_000

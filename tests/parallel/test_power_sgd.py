"""PowerSGD against the formulas of the paper in NumPy, and what a compressed sum has to keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_speedkit.parallel.power_sgd import PowerSGD


def _alone(vector: Tensor) -> None:
    """A sum over one rank."""


def _memory(module: nn.Module, rank: int = 2) -> PowerSGD:
    memory = PowerSGD(rank=rank, start_step=0)
    memory.follow(module)
    return memory


def _average(memory: PowerSGD, module: nn.Module, gradients: Sequence[Tensor]) -> list[Tensor]:
    sent = [gradient.clone() for gradient in gradients]
    memory.average(sent, list(module.parameters()), _alone, 1)
    return sent


def _gradients(module: nn.Module, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in module.parameters()]


def test_each_step_is_the_paper_s() -> None:
    module = nn.Linear(24, 16, dtype=torch.float64)
    memory, error, q = _memory(module), np.zeros((16, 24)), None
    for step in range(4):
        gradient = _gradients(module, step)
        sent = _average(memory, module, gradient)
        matrix = gradient[0].numpy() + error
        if q is None:  # the start is random; its span is all that matters
            q = torch.randn(24, 2, generator=torch.Generator().manual_seed(0)).numpy().astype(np.float64)
        p = np.linalg.qr(matrix @ np.linalg.qr(q)[0])[0]
        q = matrix.T @ p
        error = matrix - p @ q.T
        np.testing.assert_allclose(sent[0].numpy(), p @ q.T, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(sent[1], gradient[1], rtol=0, atol=0)  # the bias is sent whole


def test_what_is_lacking_comes_later() -> None:
    module = nn.Linear(20, 20, bias=False, dtype=torch.float64)
    memory, gradient = _memory(module), _gradients(module, 1)
    total = sum(_average(memory, module, gradient)[0] for _ in range(100))
    error = 100 * gradient[0] - total  # what is held back does not grow with the steps
    assert torch.linalg.norm(total) > 0
    assert torch.linalg.norm(error) < 10 * torch.linalg.norm(gradient[0])


def test_a_matrix_of_low_rank_is_sent_without_a_loss() -> None:
    module = nn.Linear(30, 20, bias=False, dtype=torch.float64)
    left, right = torch.randn(20, 2, dtype=torch.float64), torch.randn(2, 30, dtype=torch.float64)
    (sent,) = _average(_memory(module), module, [left @ right])
    torch.testing.assert_close(sent, left @ right, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("spoilt", [0.0, float("nan"), float("inf")], ids=str)
def test_a_step_of_zeros_or_infinities_is_forgotten(spoilt: float) -> None:
    module = nn.Linear(30, 20, bias=False)
    memory, gradient = _memory(module), torch.outer(torch.arange(1.0, 21), torch.arange(1.0, 31))
    _average(memory, module, [gradient])
    (sent,) = _average(memory, module, [gradient * spoilt])
    assert not sent.isfinite().all() or spoilt == 0.0  # a gradient scaler has to see it
    for _ in range(3):
        (sent,) = _average(memory, module, [gradient])
    torch.testing.assert_close(sent, gradient, rtol=1e-3, atol=1e-3)


def test_convolutions_and_16_bits() -> None:
    module = nn.Conv2d(8, 16, 3, bias=False).to(torch.bfloat16)
    memory, gradient = _memory(module), torch.ones(16, 8, 3, 3, dtype=torch.bfloat16)
    (sent,) = _average(memory, module, [gradient.to(memory_format=torch.channels_last)])
    assert sent.dtype == torch.bfloat16
    torch.testing.assert_close(sent, gradient, check_stride=False, rtol=1e-2, atol=1e-2)


def test_two_ranks_get_the_mean() -> None:
    module = nn.Linear(30, 20, dtype=torch.float64)
    mine, other = _gradients(module, 1), _gradients(module, 2)
    mine[0], other[0] = torch.ones(20, 30, dtype=torch.float64), 3 * torch.ones(20, 30, dtype=torch.float64)
    # both matrices lie in one direction, so what the other rank sends is three times what this one does
    sends: list[int] = []

    def send(vector: Tensor) -> None:
        sends.append(vector.numel())
        if len(sends) == 1:
            vector.add_(other[1])
        else:
            vector.mul_(4)

    memory, sent = _memory(module), [gradient.clone() for gradient in mine]
    memory.average(sent, list(module.parameters()), send, 2)
    assert sends == [20, 2 * 20, 2 * 30]
    torch.testing.assert_close(sent[0], 2 * torch.ones(20, 30, dtype=torch.float64))
    torch.testing.assert_close(sent[1], (mine[1] + other[1]) / 2)


def test_another_module_begins_anew_and_the_same_one_goes_on() -> None:
    first, second = nn.Linear(30, 20, bias=False), nn.Linear(30, 20, bias=False)
    memory, gradient = _memory(first), _gradients(first, 1)
    start = _average(memory, first, gradient)[0]
    memory.follow(first)
    assert not torch.equal(_average(memory, first, gradient)[0], start)
    memory.follow(second)
    assert memory.steps == 0
    torch.testing.assert_close(_average(memory, second, gradient)[0], start, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("shape", "rank", "numbers"),
    [((512, 256), 2, 2 * 768), ((512, 256), 1, 768), ((10,), 2, 10), ((), 2, 1), ((4, 4), 2, 16), ((1, 90), 2, 90)],
)
def test_what_is_sent_for_a_shape(shape: tuple[int, ...], rank: int, numbers: int) -> None:
    assert PowerSGD(rank=rank).sent_numbers(shape) == numbers


@pytest.mark.parametrize(
    ("arguments", "kind"), [({"rank": 0}, ValueError), ({"start_step": -1}, ValueError), ({"rank": 1.5}, TypeError)]
)
def test_arguments_that_make_no_sense(arguments: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind, match=next(iter(arguments))):
        PowerSGD(**arguments)

"""Tries end, messages say what to do, and errors of other kinds pass."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from lightning_speedkit.optimize.batch_split import samples_of
from lightning_speedkit.optimize.micro_batch_retry import backward_in_pieces, run_until_it_fits
from lightning_speedkit.optimize.micro_batch_size import MicroBatchSize


def _raises(error: BaseException, tried: list[int | None] | None = None) -> Any:
    def run(at_once: int | None) -> None:
        if tried is not None:
            tried.append(at_once)
        raise error

    return run


def test_one_sample_that_does_not_fit_is_a_clear_error() -> None:
    tried: list[int | None] = []
    with pytest.raises(torch.OutOfMemoryError, match=r"A step ran out of memory with 1 sample at once, .*Use a"):
        run_until_it_fits(_raises(MemoryError("no"), tried), lambda: 12, MicroBatchSize())
    assert tried == [None, 6, 3, 1]


def test_a_batch_that_cannot_be_cut_says_so() -> None:
    batch = (torch.zeros(8), torch.zeros(5))
    with pytest.raises(torch.OutOfMemoryError, match=r"cannot be computed in pieces.*batch dimensions of 5 and 8.*no$"):
        run_until_it_fits(_raises(MemoryError("no")), lambda: samples_of(batch), MicroBatchSize())
    size = MicroBatchSize()
    size.shrink(4)
    assert run_until_it_fits(lambda at_once: at_once, lambda: samples_of(batch), size) is None  # it fits whole


@pytest.mark.parametrize("error", [ValueError("a fault"), RuntimeError("NCCL error: Cuda failure 2 'out of memory'")])
def test_other_errors_pass_at_once(error: Exception) -> None:
    tried: list[int | None] = []
    with pytest.raises(type(error)) as found:
        run_until_it_fits(_raises(error, tried), lambda: 8, MicroBatchSize())
    assert (found.value, tried) == (error, [None])


def test_the_failed_try_has_let_go_of_its_tensors_before_the_next_one() -> None:
    class Activation:
        pass

    alive: list[weakref.ref[Activation]] = []

    def run(at_once: int | None) -> list[bool]:
        seen = [reference() is not None for reference in alive]
        activation = Activation()
        activation.itself = activation  # type: ignore[attr-defined]  # a cycle
        alive.append(weakref.ref(activation))
        if at_once is None or at_once > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return seen

    gc.disable()
    try:
        assert run_until_it_fits(run, lambda: 8, MicroBatchSize()) == [False, False]
    finally:
        gc.enable()


def test_a_plain_loop_in_pieces_has_the_gradient_of_the_whole_batch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = torch.randn(11, 3, dtype=torch.float64)
    unused = nn.Parameter(torch.zeros(1))
    model.register_parameter("unused", unused)
    model(x).square().mean().backward()
    model(x).mean().backward()
    expected = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).square().mean().backward()  # gradients that are there already
    first = next(model.parameters()).grad

    def loss_of(rows: torch.Tensor) -> torch.Tensor:
        loss = model(rows).mean()
        if len(rows) > 3:
            loss.backward()  # pollutes the gradients, then fails
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return loss

    loss = backward_in_pieces(loss_of, x, model, size := MicroBatchSize())
    assert size.limit == 2
    assert loss.item() == pytest.approx(model(x).mean().item(), rel=1e-12)
    torch.testing.assert_close([p.grad for p in model.parameters()], expected, rtol=1e-12, atol=1e-14)
    assert next(model.parameters()).grad is first  # in place: it may be a view into a bucket
    kept = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="a fault"):
        backward_in_pieces(_raises(ValueError("a fault")), x, model, size)
    torch.testing.assert_close([p.grad for p in model.parameters()], kept, rtol=0, atol=0)

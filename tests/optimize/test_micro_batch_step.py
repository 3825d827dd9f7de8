"""An optimizer step that failed runs again as if it had not, or says that it cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_speedkit.optimize.micro_batch_step import step_with_retry

CPU = torch.device("cpu")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).double()


def _train(make: Any, fail: Callable[[int, Callable[..., Any]], Callable[..., Any]], **options: Any) -> list[Tensor]:
    """The weights after four steps; ``fail(number, step)`` gives the step that is called."""
    model = _model()
    optimizer = make(model.parameters())
    x = torch.randn(8, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for number in range(4):

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        _, repeated = step_with_retry(optimizer, fail(number, optimizer.step), closure, device=CPU, **options)
        assert repeated == (number in (0, 2) and fail is not _never)
    return [p.detach() for p in model.parameters()]


def _never(number: int, step: Callable[..., Any]) -> Callable[..., Any]:
    return step


class _Fails:
    """A step that runs out of memory the first time it is called, in the way that ``how`` says."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __call__(self, number: int, step: Any) -> Callable[..., Any]:
        calls = []

        def failing(closure: Any) -> Any:
            calls.append(None)
            if number not in (0, 2) or len(calls) > 1:
                return step(closure=closure)
            if self.how == "before the closure":
                raise torch.OutOfMemoryError("CUDA out of memory.")
            if self.how == "before the update":
                closure()
                raise torch.OutOfMemoryError("CUDA out of memory.")
            step(closure=closure)
            raise torch.OutOfMemoryError("CUDA out of memory.")

        return failing


@pytest.mark.parametrize("how", ["before the closure", "before the update", "after the update"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_repeated_step_is_the_step(name: str, how: str) -> None:
    expected = _train(OPTIMIZERS[name], _never)
    found = _train(OPTIMIZERS[name], _Fails(how), copy_bytes=1e6)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_a_half_done_step_without_a_copy_is_an_error_and_an_untouched_one_is_not() -> None:
    with pytest.raises(torch.OutOfMemoryError, match=r"AdamW\.step\(\) ran out of memory after it had changed"):
        _train(OPTIMIZERS["adamw"], _Fails("after the update"), copy_bytes=0)
    expected = _train(OPTIMIZERS["adamw"], _never)
    found = _train(OPTIMIZERS["adamw"], _Fails("before the update"), copy_bytes=0)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_memory_that_runs_out_inside_adam_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real place: its state is half made, or its moments are updated and the weights are not."""
    expected = _train(OPTIMIZERS["adamw"], _never)
    for name in ("zeros_like", "_foreach_sqrt"):
        real, left = getattr(torch, name), [2]

        def scarce(*arguments: Any, real: Any = real, left: list[int] = left, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == (0 if real is torch.zeros_like else 1):
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return real(*arguments, **options)

        model = _model()
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        x = torch.randn(8, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        repeats = []
        for _ in range(4):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            with monkeypatch.context() as patch:
                patch.setattr(torch, name, scarce)
                _, repeated = step_with_retry(optimizer, optimizer.step, device=CPU, copy_bytes=1e6)
            repeats.append(repeated)
        assert repeats == [True, False, False, False], name
        assert [group["foreach"] for group in optimizer.param_groups] == [True]
        torch.testing.assert_close([p.detach() for p in model.parameters()], expected, rtol=1e-12, atol=0)


def test_a_second_failure_is_told() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = []

    def step() -> None:
        calls.append(None)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError, match="ran out of memory twice"):
        step_with_retry(optimizer, step, device=CPU)
    assert len(calls) == 2


@pytest.mark.parametrize("error", [ValueError("a fault"), RuntimeError("Cuda failure 2 'out of memory'")])
def test_other_errors_pass(error: Exception) -> None:
    def step() -> None:
        raise error

    with pytest.raises(type(error)) as found:
        step_with_retry(torch.optim.SGD(_model().parameters(), lr=0.1), step, device=CPU)
    assert found.value is error


def test_an_error_of_the_closure_and_a_step_that_evaluates_it_twice_are_not_repeated() -> None:
    model = _model()
    calls = []

    def closure() -> Tensor:
        calls.append(None)
        if len(calls) % 2 == 0:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        loss = model(torch.ones(1, 2, dtype=torch.float64)).mean()
        loss.backward()
        return loss

    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA"):
        step_with_retry(optimizer, optimizer.step, closure, device=CPU)
    assert len(calls) == 2


def test_a_step_that_is_put_back_is_parameter_by_parameter_only_for_its_time() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], lr=0.1, foreach=True)
    weight.grad, calls = torch.ones(2), []

    def step() -> None:
        calls.append(optimizer.param_groups[0]["foreach"])
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        optimizer.step()

    def closure_step(closure: Callable[[], Any]) -> None:
        closure()
        step()

    step_with_retry(optimizer, closure_step, lambda: None, device=CPU, copy_bytes=1e6, one_by_one=lambda: True)
    assert calls == [False, False]
    assert optimizer.param_groups[0]["foreach"] is True

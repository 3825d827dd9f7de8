"""Nothing that is drawn inside is missed outside, whatever ends the block."""

from __future__ import annotations

import random
from contextlib import suppress

import numpy
import pytest
import torch

from lightning_speedkit.measure import own_random_numbers as module
from lightning_speedkit.measure.own_random_numbers import own_random_numbers


def _draw() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_the_next_numbers_are_those_that_would_have_come(error: type[BaseException] | None) -> None:
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(3)
    expected = [_draw(), _draw()]
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(3)
    first = _draw()
    with suppress(ValueError, KeyboardInterrupt), own_random_numbers():
        torch.manual_seed(0)
        _draw()
        if error is not None:
            raise error
    assert [first, _draw()] == expected


def test_the_error_comes_through() -> None:
    with pytest.raises(ValueError, match="mine"), own_random_numbers():
        raise ValueError("mine")


@pytest.mark.parametrize(
    ("device", "initialized", "kept"), [("cpu", False, False), ("cpu", True, True), ("cuda:1", False, True)]
)
def test_cuda_is_not_started_for_it(
    monkeypatch: pytest.MonkeyPatch, device: str, initialized: bool, kept: bool
) -> None:
    asked = []
    plain = module.isolate_rng
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(module, "isolate_rng", lambda include_cuda: asked.append(include_cuda) or plain(False))
    with own_random_numbers(device):
        pass
    assert asked == [kept]

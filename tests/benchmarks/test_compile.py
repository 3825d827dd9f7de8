"""The two functions of the benchmark, in this process, with a backend that compiles nothing."""

from __future__ import annotations

import pytest

from benchmarks.compile import forward, train


@pytest.mark.parametrize("net", ["conv", "transformer"])
def test_forward_tells_times(net: str) -> None:
    told = forward(calls=1, net=net, compiled=True, last=net == "conv", backend="eager", rows=2)
    assert told.keys() == {"forward_seconds", "compile_seconds"}
    assert min(told.values()) > 0
    assert forward(calls=1, net=net, rows=2).keys() == {"forward_seconds"}


def test_training_tells_times() -> None:
    told = train(steps=4, net="conv", compiled=True, last=True, backend="eager", rows=2)
    assert told.keys() - {"break_even_steps"} == {"step_seconds", "compile_seconds"}
    assert min(told.values()) > 0

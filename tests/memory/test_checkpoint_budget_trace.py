"""One traced run: bytes and lifetimes worked out by hand, and seconds that a module is known to take."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_speedkit.memory.checkpoint_budget_trace import Trace, time_forwards, trace_run


class Wave(nn.Module):
    """Two sines: each saves its input, so of the results the first is saved once, and the second not at all."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(torch.sin(x))


def _traced() -> Trace:
    waves = nn.Sequential(Wave(), Wave())
    x = torch.ones(256, requires_grad=True)  # 1 KB that is there before
    return trace_run(waves, lambda: waves(x).sum().backward(), {"0": waves[0], "1": waves[1]})


def test_each_storage_lives_from_its_operation_to_the_last_that_holds_it() -> None:
    trace = _traced()
    first, second, third, fourth = [life for life in trace.lives if life.made < trace.backward and life.nbytes == 1024]
    assert [len(life.packs) for life in (first, second, third, fourth)] == [1, 1, 1, 0]
    assert first.made < second.made < third.made < fourth.made
    for life in (first, second, third):
        (pack,) = life.packs
        assert pack.wanted is not None
        assert life.made < pack.saved < trace.backward <= pack.wanted < trace.length
    wanted = [life.packs[0].wanted or 0 for life in (first, second, third)]
    assert wanted == sorted(wanted, reverse=True)  # the backward goes the other way
    assert fourth.freed is not None
    assert fourth.freed <= trace.backward  # the sum does not save it


def test_a_call_knows_when_it_was_and_what_it_was_given() -> None:
    trace = _traced()
    first, second = trace.calls
    assert (first.path, second.path) == ("0", "1")
    assert first.start < first.end <= second.start < second.end <= trace.backward
    assert first.inputs == ()  # was there before
    (given,) = second.inputs
    assert first.start <= trace.lives[given].made < first.end
    inside = [life for life in trace.lives if first.start <= life.made < first.end]
    assert [life.nbytes for life in inside] == [1024, 1024]


def test_a_view_and_a_second_save_are_one_storage() -> None:
    x = torch.ones(4, 64, requires_grad=True)

    def run() -> None:
        y = torch.exp(x)  # saves its result
        (torch.sin(y) + torch.sin(y.view(-1)).view(4, 64)).sum().backward()  # and these save it too

    trace = trace_run(nn.Identity(), run, {})
    assert [len(life.packs) for life in trace.lives if life.packs] == [3]


def test_the_hooks_are_gone_also_after_an_error() -> None:
    wave = Wave()

    def run() -> None:
        wave(torch.ones(2))
        raise KeyError

    with pytest.raises(KeyError):
        trace_run(wave, run, {"": wave})
    with pytest.raises(KeyError):
        time_forwards(run, {"": wave}, torch.device("cpu"))
    assert not wave._forward_hooks
    assert not wave._forward_pre_hooks


def test_seconds_are_of_all_forwards_of_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that every run of the layer moves by 2, and every call of the whole by 10 more."""
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            clock[0] += 2
            return x

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer()

        def forward(self, x: Tensor) -> Any:
            clock[0] += 10
            return self.layer(self.layer(x))

    whole = Whole()

    def run() -> None:
        whole(torch.ones(1))
        clock[0] += 100

    told = time_forwards(run, {"whole": whole, "whole.layer": whole.layer}, torch.device("cpu"))
    assert told == (114.0, {"whole": 14.0, "whole.layer": 4.0})

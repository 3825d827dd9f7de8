"""Converting without a Trainer: the first engine whose copy is right, and of every other one why it is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import lightning_speedkit.compress.convert as convert
from lightning_speedkit.compress.calls import Call, replay
from lightning_speedkit.compress.convert import convert_model
from lightning_speedkit.compress.engine import Converted
from lightning_speedkit.compress.float_copy import fingerprint
from lightning_speedkit.errors import QuantizationError
from tests.compress.fakes import FakeEngine, answering, rounded_to


class _Engine(FakeEngine):
    asked: Any = None

    def convert(
        self, floating: nn.Module, calls: Sequence[Call], skip: Sequence[str] = (), device: str = "cpu"
    ) -> Converted:
        self.asked = (floating, calls, tuple(skip), device)
        made: Converted = self.prepare(floating, calls, device).convert(skip)
        return made


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def use(*found: FakeEngine) -> None:
        monkeypatch.setattr(convert, "engines_for", lambda scheme, device: found)

    return use


def test_the_first_engine_that_is_right_is_taken(engines: Callable[..., None]) -> None:
    absent = _Engine("absent", why_missing="pip install it")
    broken = _Engine("broken", fails=RuntimeError("no kernel"))
    zeros = _Engine("zeros", change=answering(lambda net, forward, x: torch.zeros_like(forward(x))))
    right, later = _Engine("right", change=rounded_to(1e-3)), _Engine("later")
    engines(absent, broken, zeros, right, later)
    made = convert_model(_net(), [torch.randn(4, 4)])
    assert (made.engine, made.quantized) == ("right", ("0", "2"))
    assert absent.made == []
    assert later.made == []


def test_when_none_can_every_reason_is_told(engines: Callable[..., None]) -> None:
    engines(
        _Engine("absent", why_missing="pip install it"),
        _Engine("broken", fails=KeyError("no kernel")),
        _Engine("zeros", change=answering(lambda net, forward, x: torch.zeros_like(forward(x)))),
        _Engine("not finite", change=answering(lambda net, forward, x: forward(x) / 0)),
    )
    with pytest.raises(QuantizationError) as told:
        convert_model(_net(), [torch.randn(4, 4)])
    text = str(told.value)
    assert text.startswith(
        "Sequential could not be quantized. absent: pip install it broken: 'no kernel' zeros: no cal"
    )
    assert "not finite: wrong outputs: " in text


def test_what_the_engine_is_given(engines: Callable[..., None]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
            result: Tensor = self.fc(x) * scale
            return result

    engine, x = _Engine("right"), torch.randn(3, 4, dtype=torch.float64)
    engines(engine)
    net = Net().double().train()
    made = convert_model(net, iter([x, (x,), [x], {"x": x, "scale": 2.0}]), skip=["fc"])
    floating, calls, skip, device = engine.asked
    assert [(len(call.args), dict(call.kwargs).get("scale")) for call in calls] == [(1, None)] * 3 + [(0, 2.0)]
    assert calls[0].args[0].dtype == floating.fc.weight.dtype == torch.float32
    assert (skip, device, made.skipped) == (("fc",), "cpu", {"fc": "named in skip"})
    assert not floating.training
    assert net.training
    assert net.fc.weight.dtype == torch.float64


def test_model_batches_and_random_numbers_are_as_before(engines: Callable[..., None]) -> None:
    def draws(network: nn.Module, layers: tuple[str, ...]) -> None:
        torch.rand(3)
        numpy.random.rand(3)

    engines(_Engine("draws", change=draws))
    net, x = _net(), torch.randn(4, 4)
    before, kept = fingerprint(net), x.clone()
    torch.manual_seed(5)
    numpy.random.seed(5)
    expected = torch.rand(2), numpy.random.rand(2)
    torch.manual_seed(5)
    numpy.random.seed(5)
    convert_model(net, [x])
    assert torch.equal(torch.rand(2), expected[0])
    assert (numpy.random.rand(2) == expected[1]).all()
    assert fingerprint(net) == before
    assert torch.equal(x, kept)


def test_a_model_that_an_engine_has_changed_is_an_error(engines: Callable[..., None]) -> None:
    net = _net()

    def spoils(network: nn.Module, layers: tuple[str, ...]) -> None:
        net[0].weight.data[0, 0] += 1.0

    engines(_Engine("spoils", change=spoils), _Engine("right"))
    with pytest.raises(QuantizationError, match="The float model changed while it was quantized"):
        convert_model(net, [torch.randn(4, 4)])


def test_arguments_that_cannot_be_meant() -> None:
    with pytest.raises(ValueError, match="needs at least one batch to calibrate and check with, got none"):
        convert_model(_net(), [])
    with pytest.raises(ValueError, match=r"backend .*, got 'torch_ao_static'\. Did you mean 'torch-ao-static'\?"):
        convert_model(_net(), [torch.ones(1, 4)], backend="torch_ao_static")
    with pytest.raises(ValueError, match=r"scheme must be one of .*, got 'int8'"):
        convert_model(_net(), [torch.ones(1, 4)], scheme="int8")
    with pytest.raises(QuantizationError, match=r"could not be quantized\. torchao-fp8: torchao-fp8 is for cuda"):
        convert_model(_net(), [torch.ones(1, 4)], backend="torchao-fp8")


def test_the_backend_stands_in_the_place_of_the_scheme() -> None:
    net, x = _net(), torch.randn(16, 4)
    made = convert_model(net, [x], scheme="static-int8", backend="torch-ao-dynamic", skip=["2"])
    assert (made.engine, made.scheme, made.quantized) == ("torch-ao-dynamic", "dynamic-int8", ("0",))
    answer = replay(made.module, [Call("", (x,), {})])[0]
    # plain float, with the first weight rounded to 255 steps and its input to 127
    error = (answer - net(x)).detach().norm() / net(x).detach().norm()
    assert 0 < float(error) < 0.03

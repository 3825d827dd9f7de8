"""What comes of each engine: a checked copy with what it weighs and how long it takes, or the reason why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_speedkit.compress.calls import Call
from lightning_speedkit.compress.candidates import (
    Candidate,
    float_as_it_runs,
    make_candidate,
    needed_arguments,
    time_all,
    told,
)
from lightning_speedkit.compress.float_copy import float_copy
from lightning_speedkit.errors import MissingExtraError, QuantizationError
from tests.compress.fakes import FakeEngine, answering
from tests.compress.models import digit_batches, mlp


def _calls() -> list[Call]:
    return [Call("", (batch,), {}) for batch in digit_batches(2)]


def _net() -> nn.Module:
    torch.manual_seed(0)
    return float_copy(mlp())


def _made(engine: Any, skip: tuple[str, ...] = (), net: nn.Module | None = None) -> Candidate:
    return make_candidate(engine, _net() if net is None else net, _calls(), skip, "cpu")


def test_a_copy_that_answers_alike_is_usable() -> None:
    net = _net()
    candidate = _made(FakeEngine("a", change=answering(lambda _, plain, x: plain(x) * 1.01)), ("1",), net)
    assert candidate.usable
    report = candidate.report
    assert (report.backend, report.scheme, report.outcome, report.reason) == ("a", "static-int8", "", "")
    assert report.bytes == 400 + 100  # layer 1 in float, layer 3 not
    assert report.relative_error == pytest.approx(0.01, rel=1e-3)
    assert candidate.converted is not None
    assert candidate.converted.quantized == ("3",)


def test_a_copy_that_answers_wrongly_is_not_usable_and_weighs_nothing() -> None:
    candidate = _made(FakeEngine("a", change=answering(lambda _, plain, x: plain(x) * 1.4)))
    assert candidate.converted is not None
    assert not candidate.usable
    assert (candidate.report.outcome, candidate.report.bytes) == ("saturation", None)
    assert candidate.report.reason.startswith("saturation: ")
    assert candidate.report.relative_error == pytest.approx(0.4, rel=1e-3)


def _broken(*_: Any) -> Any:
    raise KeyError("no such\nlayer")


@pytest.mark.parametrize(
    ("engine", "outcome", "reason"),
    [
        (FakeEngine("a", why_missing="no such CPU"), "missing", "no such CPU"),
        (FakeEngine("a", fails=MissingExtraError("it", extra="quant", library="x")), "missing", "it needs x"),
        (FakeEngine("a", fails=QuantizationError("cannot  be\nexported")), "failed", "cannot be exported"),
        (FakeEngine("a", fails=RuntimeError()), "failed", "RuntimeError"),
        (FakeEngine("a", change=_broken), "failed", "KeyError: 'no such\\nlayer'"),
    ],
    ids=["missing", "missing-extra", "cannot-export", "fails-silently", "cannot-convert"],
)
def test_what_makes_nothing_says_why(engine: Any, outcome: str, reason: str) -> None:
    candidate = _made(engine)
    assert (candidate.usable, candidate.converted) == (False, None)
    assert candidate.report.outcome == outcome
    assert candidate.report.reason.startswith(reason)


def test_a_copy_without_a_quantized_layer_is_none_unless_it_is_to_be_float() -> None:
    candidate = _made(FakeEngine("a"), ("1", "3"))
    assert candidate.report.reason == "No layer could be quantized (1: named in skip; 3: named in skip)."
    candidate = _made(FakeEngine("a"), net=nn.Sequential(nn.Flatten()))
    assert candidate.report.reason == "No layer could be quantized (it has no layer with a weight)."
    assert _made(FakeEngine("a", scheme="float32")).usable


def test_converting_again_forgets_what_was_before() -> None:
    net, engine = _net(), FakeEngine("a")
    candidate = _made(engine, net=net)
    assert candidate.usable
    candidate.convert(net, _calls(), ("1", "3"), "cpu")
    assert (candidate.usable, candidate.converted, candidate.check) == (False, None, None)
    assert candidate.report.outcome == "failed"


def test_all_usable_copies_and_the_float_one_are_timed() -> None:
    net = _net()
    good, bad = _made(FakeEngine("a"), net=net), _made(FakeEngine("b", fails=RuntimeError()), net=net)
    called: list[str] = []
    assert good.converted is not None
    for name, module in (("float", net), ("copy", good.converted.module)):
        module.register_forward_pre_hook(lambda _, args, name=name: called.append(f"{name} {len(args[0])}"))
    batch, one = time_all(net, [good, bad], _calls()[:1], "cpu")
    for seconds in (batch, one, good.report.seconds_batch, good.report.seconds_one):
        assert seconds is not None
        assert seconds > 0
    assert (bad.report.seconds_batch, bad.report.seconds_one) == (None, None)
    assert set(called) == {"float 32", "copy 32", "float 1", "copy 1"}
    assert called.count("float 32") == called.count("copy 32")
    assert not set(called[:2]) & {"float 1", "copy 1"}


def test_a_network_that_needs_a_full_batch_has_no_time_for_one_sample() -> None:
    class Full(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) == 1:
                raise ValueError("one sample")
            return x

    batch, one = time_all(Full(), [], _calls(), "cpu")
    assert batch is not None
    assert one is None


def test_the_float_copy_has_the_fused_path_of_the_users_own() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 2).eval()
    floating = float_copy(encoder)
    twin: Any = float_as_it_runs(encoder, floating, "cpu")
    assert twin is not floating
    assert (encoder.use_nested_tensor, twin.use_nested_tensor, floating.use_nested_tensor) == (True, True, False)
    assert [layer.activation_relu_or_gelu for layer in twin.layers] == [1, 1]
    assert [layer.activation_relu_or_gelu for layer in floating.layers] == [0, 0]  # type: ignore[union-attr]


def test_an_error_in_one_line() -> None:
    assert told(ValueError("a\n  b")) == "ValueError: a b"
    assert told(QuantizationError("a\nb")) == "a b"
    assert len(told(ValueError("x" * 1000))) == len("ValueError: ") + 300


def test_what_cannot_be_timed_does_not_stop_the_others() -> None:
    class OnlyOnce(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError

    net = _net()
    first, second = _made(FakeEngine("a"), net=net), _made(FakeEngine("b"), net=net)
    assert first.converted is not None
    first.converted.module = OnlyOnce()
    batch, one = time_all(net, [first, second], _calls(), "cpu")
    assert batch is not None
    assert one is not None
    assert (first.report.seconds_batch, first.report.seconds_one) == (None, None)
    assert second.report.seconds_batch is not None
    assert time_all(OnlyOnce(), [second], _calls(), "cpu") == (None, None)


class _Asks(nn.Linear):
    """Answers from ``x`` alone, and with a loss where there are labels; the copy below wants what it is told to."""

    def __init__(self, wants: tuple[str, ...] = ("x",)) -> None:
        super().__init__(2, 1)
        self.wants = wants

    def forward(self, x: Tensor, labels: Any = None, mask: Tensor | None = None, **more: Any) -> Tensor:
        given = {"x": x, "labels": labels, "mask": mask, **more}
        if any(given.get(name) is None for name in self.wants):
            raise ValueError(f"wants {self.wants}")
        return super().forward(x)


_X = torch.ones(3, 2)


@pytest.mark.parametrize(
    ("call", "float_wants", "copy_wants", "needed"),
    [
        (Call("", (_X, _X), {"mask": _X}), ("x",), ("x", "labels"), ["labels"]),
        (Call("", (), {"x": _X, "labels": {"y": _X}, "mask": _X}), ("x",), ("x", "labels", "mask"), ["labels", "mask"]),
        (Call("", (_X,), {"labels": _X}), ("x", "labels"), ("x", "labels"), []),  # the float model wants them too
        (Call("", (_X,), {"labels": _X}), ("x",), ("x",), []),
        (Call("", (_X,), {"start": _X, "kind": "a"}), ("x",), ("start", "kind"), ["start"]),
        (Call("", (_X,), {}), ("x",), ("x",), []),
        (Call("", (_X,), {"more": {"a": _X, "b": _X}}), ("x",), ("x",), []),
    ],
)
def test_arguments_that_only_the_copy_needs_are_found(
    call: Call, float_wants: tuple[str, ...], copy_wants: tuple[str, ...], needed: list[str]
) -> None:
    assert needed_arguments(_Asks(float_wants), _Asks(copy_wants), [call, call]) == needed
    inner = Call("0", call.args, call.kwargs)
    assert needed_arguments(nn.Sequential(_Asks(float_wants)), nn.Sequential(_Asks(copy_wants)), [inner]) == needed


class _OneDict(nn.Linear):
    """Takes a batch as one dict, as a step that calls ``self(batch)`` gives it."""

    def __init__(self, wants: tuple[str, ...]) -> None:
        super().__init__(2, 1)
        self.wants = wants

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        if set(self.wants) - set(batch):
            raise ValueError(f"wants {self.wants}")
        return super().forward(batch["x"])


def test_what_only_the_copy_needs_inside_of_a_dict_is_found() -> None:
    call = Call("", ({"x": _X, "labels": _X},), {})
    assert needed_arguments(_OneDict(("x",)), _OneDict(("x", "labels")), [call]) == ["batch['labels']"]
    assert needed_arguments(_OneDict(("x", "labels")), _OneDict(("x", "labels")), [call]) == []

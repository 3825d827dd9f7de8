"""The parts of a network that become ONNX graphs: the outermost that can, each checked, and why others cannot."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_speedkit.compress import onnx_parts
from lightning_speedkit.compress.call_form import form_of
from lightning_speedkit.compress.calls import Call
from lightning_speedkit.compress.onnx_graph import OnnxGraph, graph_bytes
from lightning_speedkit.compress.onnx_module import OnnxModule
from lightning_speedkit.compress.onnx_parts import OnnxPart, find_parts
from lightning_speedkit.errors import MissingExtraError


class _Net(nn.Module):
    """``head(between(body(x)))``, whose parts take part only if ``between`` can be exported."""

    def __init__(self, between: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Sequential(nn.Linear(3, 4), nn.ReLU()), nn.Linear(4, 2)
        self.between = between
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.between(self.body(x)))


def _branch(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x


def _calls(*names: str) -> list[Call]:
    torch.manual_seed(1)
    return [Call(name, (torch.randn(size, 3),), {}) for name in names for size in (4, 6)]


def _answer(part: OnnxPart, x: Tensor) -> Tensor:
    answer: Tensor = OnnxModule(graph_bytes(part.graph.model), part.form)(x)
    return answer


def test_a_network_that_can_be_exported_is_one_part() -> None:
    net, calls = _Net(), _calls("")
    (part,), reasons = find_parts(net, calls)
    assert (part.name, reasons) == ("", {})
    assert part.graph.layers == [("body.0",), ("head",)]
    assert all(torch.equal(seen[0], call.args[0]) for seen, call in zip(part.inputs, calls, strict=True))
    x = torch.randn(9, 3)
    with torch.no_grad():
        torch.testing.assert_close(_answer(part, x), net(x), rtol=1e-5, atol=1e-5)


def test_around_a_branch_its_parts_are_taken_with_the_inputs_that_they_had() -> None:
    net, calls = _Net(_branch), _calls("")
    parts, reasons = find_parts(net, calls)
    assert [part.name for part in parts] == ["body", "head"]
    assert [part.graph.layers for part in parts] == [[("body.0",)], [("head",)]]
    assert list(reasons) == [""]
    assert reasons[""].startswith("it cannot be exported (")
    with torch.no_grad():
        hidden = [_branch(torch.relu(net.body[0](call.args[0]))) for call in calls]
    for seen, expected in zip(parts[1].inputs, hidden, strict=True):
        torch.testing.assert_close(seen, [expected], rtol=0, atol=0)
    assert not any(module._forward_pre_hooks for module in net.modules())


class _Counting(nn.Module):
    """Answers otherwise each time, which an export keeps as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.count = nn.Linear(3, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.layer(x) * self.count


def test_a_graph_that_differs_from_the_network_is_not_taken() -> None:
    (part,), reasons = find_parts(_Counting().eval(), _calls(""))
    assert part.name == "layer"
    found = re.match(r"its graph differs from it by (\d\.\de[-+]\d\d): ", reasons.pop(""))
    assert found is not None
    assert float(found.group(1)) > 0.05
    assert reasons == {}


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the modules that are tried; every one is a part but those that hold a ``_Net`` or ``_Counting``."""
    names: list[str] = []

    def take(_: Any, module: nn.Module, name: str, own: Sequence[Call]) -> OnnxPart:
        names.append(name)
        if any(isinstance(inner, (_Net, _Counting)) for inner in module.modules()):
            raise ZeroDivisionError("of several\n  lines")
        form = form_of(module, own[0].args, own[0].kwargs, torch.ones(1))
        return OnnxPart(name, form, OnnxGraph(None, []), [list(call.args) for call in own])

    monkeypatch.setattr(onnx_parts._Search, "_part", take)
    return names


def test_the_outermost_are_tried_first_and_any_error_is_a_reason(tried: list[str]) -> None:
    net, calls = nn.Sequential(_Counting(), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))).eval(), _calls("")
    parts, reasons = find_parts(net, calls)
    assert tried == ["", "0", "0.layer", "1"]
    assert [part.name for part in parts] == ["0.layer", "1"]
    assert reasons == dict.fromkeys(["", "0"], "ZeroDivisionError: of several lines")


def test_a_part_that_is_also_called_from_outside_is_a_part_of_its_own(tried: list[str]) -> None:
    calls = _calls("", "body")
    parts, reasons = find_parts(_Net(), calls)
    assert tried == [part.name for part in parts] == ["body", "head"]
    assert reasons == {"": "a part of it is called from outside too"}
    assert [id(seen[0]) for seen in parts[0].inputs] == [id(call.args[0]) for call in calls[2:]]


def test_modules_without_weights_and_modules_that_were_not_called_are_not_tried(tried: list[str]) -> None:
    net = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2), "plain": nn.ReLU()}).eval()
    parts, reasons = find_parts(net, _calls("used", "plain"))
    assert tried == [part.name for part in parts] == ["used"]
    assert reasons == {}


def test_only_so_many_exports_are_tried(tried: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_parts, "_ATTEMPTS", 2)
    parts, reasons = find_parts(_Net(), _calls(""))
    assert tried == ["", "body"]
    assert [part.name for part in parts] == ["body"]
    assert reasons["head"] == "2 other parts were tried before"


def test_a_missing_library_is_an_error_and_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(MissingExtraError, match=r"onnxscript.*lightning-speedkit\[quant\]"):
        find_parts(_Net(), _calls(""))

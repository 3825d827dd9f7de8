"""A module that runs by its graph is still that module, and runs only what was traced."""

from __future__ import annotations

import copy
import enum
import inspect
import warnings
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_speedkit.compress import quantize_model
from lightning_speedkit.compress.torch_ao import (
    quantized_engine,
)
from lightning_speedkit.compress.traced import observe_forward, run_by_graph, signature_template
from lightning_speedkit.errors import QuantizationError
from tests.compress.models import (
    DirectDigits,
    digits,
)


def test_forward_keeps_keywords_and_refuses_what_was_not_traced() -> None:
    model = DirectDigits().eval()
    x, mask = digits()[0][:32], torch.zeros(32, 10, dtype=torch.bool)
    mask[:, 3] = True
    int8, details = quantize_model(model, [{"x": x, "mask": mask}])
    assert details.backend == "torch-ao-static"
    with torch.no_grad():
        torch.testing.assert_close(int8(x=x, mask=mask), int8(x, 1.0, mask), rtol=0, atol=0)
        assert float(int8(x, mask=mask)[:, 3].max()) < -1e8
        with pytest.raises(ValueError, match=r": mask is missing\. .*backend='torch-ao-dynamic'"):
            int8(x)
        with pytest.raises(ValueError, match=r": scale is 2\.0, and was 1\.0\."):
            int8(x, scale=2.0, mask=mask)
        with pytest.raises(TypeError, match="unexpected keyword argument 'masc'"):
            int8(x, masc=mask)


class _Options(nn.Module):
    """Adds things up.

    In more than one way.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)

    def forward(self, x: Tensor, *more: Tensor, scale: float = 2.0, flags: Any = None) -> Tensor:
        return sum(more, self.conv(x) * scale) * (2 if flags else 1)


_Pair = namedtuple("_Pair", "a b")


class _Mode(enum.Enum):
    FAST = 1


def test_template_names_every_argument_and_marks_the_tensors() -> None:
    x = torch.ones(1)
    template = signature_template(_Options(), (x, x), {"flags": {"a": [x, 1], "b": (None, torch.float32)}})
    assert template == {
        "x": "<tensor>",
        "more": ("<tensor>",),
        "scale": 2.0,
        "flags": {"a": ["<tensor>", 1], "b": (None, torch.float32)},
    }
    torch.save(template, "template")
    assert torch.load("template", weights_only=True) == template


@pytest.mark.parametrize(
    "value", [_Mode.FAST, _Pair(torch.ones(1), 2), object(), {_Mode.FAST: 1}, [[{"deep": object()}]], lambda: None]
)
def test_an_argument_that_cannot_be_saved_is_refused(value: Any) -> None:
    with pytest.raises(QuantizationError, match="argument 'flags' is neither a tensor nor plain Python, but"):
        signature_template(_Options(), (torch.ones(1),), {"flags": value})


def test_arguments_that_do_not_fit_are_refused_as_python_does() -> None:
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        signature_template(_Options(), (), {})


def _by_graph(model: nn.Module, args: Any, kwargs: Any) -> tuple[nn.Module, torch.fx.GraphModule]:
    template = signature_template(model, args, kwargs)
    graph = observe_forward(copy.deepcopy(model), template, engine=quantized_engine())
    run_by_graph(model, graph, template)
    return model, graph


def test_only_tensors_are_inputs_of_the_graph() -> None:
    x = torch.randn(2, 1, 5, 5)
    model, graph = _by_graph(_Options().eval(), (x, torch.ones(1), torch.ones(1)), {"flags": True})
    inputs, *others = [node for node in graph.graph.nodes if node.op == "placeholder"]
    assert others == []
    assert sorted(user.args[1] for user in inputs.users) == [0, 1, 2]
    expected = (torch.conv2d(x, model.conv.weight, model.conv.bias) * 2.0 + 1 + 3) * 2
    torch.testing.assert_close(model(x, torch.ones(1), torch.full((1,), 3.0), flags=True), expected)


def test_the_module_stays_of_its_kind() -> None:
    original = _Options().eval()
    model, _ = _by_graph(copy.deepcopy(original), (torch.randn(2, 1, 5, 5),), {})
    assert isinstance(model, _Options)
    assert type(model).__name__ == "Quantized_Options"
    assert (type(model).__module__, type(model).__doc__) == (_Options.__module__, _Options.__doc__)
    assert inspect.signature(model.forward) == inspect.signature(original.forward)
    assert type(original) is _Options
    twin = copy.deepcopy(model)
    x = torch.randn(3, 1, 5, 5)
    torch.testing.assert_close(twin(x), original(x))
    torch.testing.assert_close(model(x), original(x))


def test_a_part_inside_another_keeps_its_own_forward() -> None:
    outer = nn.Sequential(_Options(), nn.ReLU()).eval()
    x = torch.randn(2, 1, 5, 5)
    expected = outer(x)
    _by_graph(outer[0], (x,), {})
    torch.testing.assert_close(outer(x), expected)
    with pytest.raises(ValueError, match=r"forward of _Options can only be called .*: scale is 3.0, and was 2.0\."):
        outer[0](x, scale=3.0)


def test_values_that_a_graph_reads_are_put_into_the_module() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Module()
            self.inner.shift = torch.ones(2)  # type: ignore[assignment]
            self.count = 3

        def forward(self, x: Tensor) -> Tensor:
            return x

    def graph_of(target: str) -> torch.fx.GraphModule:
        graph = torch.fx.Graph()
        x, value = graph.placeholder("x"), graph.get_attr(target)
        graph.output(graph.call_function(torch.add, (x, value)))
        return torch.fx.GraphModule(Root(), graph)

    module = Root()
    module.inner = nn.Module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_by_graph(module, graph_of("inner.shift"), {"x": "<tensor>"})
        assert "inner.shift" in module.state_dict()
        with pytest.raises(QuantizationError, match="reads 'count', a int, which cannot be saved"):
            run_by_graph(Root(), graph_of("count"), {"x": "<tensor>"})


def test_fused_layers_become_identities_under_every_name() -> None:
    net = nn.Sequential(OrderedDict(conv=nn.Conv2d(1, 2, 3), norm=nn.BatchNorm2d(2))).eval()
    net.alias = net.norm
    graph = torch.fx.symbolic_trace(nn.Sequential(OrderedDict(conv=nn.Conv2d(1, 2, 3))))
    run_by_graph(net, graph, {"input": "<tensor>"}, fused=["norm"])
    assert isinstance(net.norm, nn.Identity)
    assert net.alias is net.norm

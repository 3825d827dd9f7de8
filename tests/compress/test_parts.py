"""Parts are the largest that torch.fx can trace; one that does not work leaves those inside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_speedkit.compress.parts as parts_module
from lightning_speedkit.compress import quantize_model
from lightning_speedkit.compress.calls import (
    Call,
    replay,
    used_modules,
)
from lightning_speedkit.compress.float_copy import copy_module, float_copy
from lightning_speedkit.compress.parts import PartSearch, calibrated_parts, install_part, part_from_recipe
from lightning_speedkit.compress.quality import (
    relative_error,
)
from lightning_speedkit.compress.torch_ao import (
    CONVOLUTIONS,
    is_quantized,
    quantized_engine,
)
from tests.compress.models import (
    Branching,
    ConvNet,
    digit_batches,
    digits,
    relative,
)


def test_what_cannot_be_traced_is_quantized_in_the_parts_that_can() -> None:
    model = Branching().eval()
    int8, details = quantize_model(model, digit_batches())
    assert (details.backend, details.recipe["dynamic"]) == ("torch-ao-static", ["head"])
    assert details.layers_quantized == ("block.0", "block.2", "head")
    with torch.no_grad():
        assert relative(model(digits()[0][:9]), int8(digits()[0][:9])) < 0.06
        assert int8(-digits()[0][:9]).shape == (9, 10)  # the other branch, decided by the values as before


class _Dangerous(nn.Module):
    """torch.fx traces it without complaint and gets another function: a proxy is no Tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)

    def forward(self, x: object) -> Tensor:
        assert x is not None
        factor = 3.0 if isinstance(x, Tensor) else 1.0
        return self.conv(x) * factor


def test_a_trace_that_computes_something_else_is_not_used() -> None:
    model = _Dangerous().eval()
    int8, details = quantize_model(model, digit_batches())
    with torch.no_grad():
        assert relative(model(digits()[0][:9]), int8(digits()[0][:9])) < 0.06
    assert details.layers_quantized == ("conv",)


def _search(root: nn.Module, calls: list[Call], wanted: Any = CONVOLUTIONS) -> tuple[list[str], dict[str, str]]:
    reasons: dict[str, str] = {}
    used = used_modules(root, calls)
    search = PartSearch(wanted, used, {call.name for call in calls}, quantized_engine(), (), reasons)
    return [part.name for part in search.parts(root)], reasons


def test_the_largest_parts_are_found_and_the_reasons_told() -> None:
    calls = [Call("", (digit_batches(1)[0],), {})]
    assert _search(ConvNet().eval(), calls) == ([""], {})
    names, reasons = _search(Branching().eval(), calls)
    assert names == ["block"]
    assert list(reasons) == [""]
    assert reasons[""].startswith("it cannot be traced and converted (TraceError: ")
    names, _ = _search(Branching().eval(), calls, (*CONVOLUTIONS, nn.Linear))
    assert names == ["block", "head"]


def test_what_is_entered_from_outside_stays_in_its_place() -> None:
    net = nn.Sequential(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)), nn.Conv2d(4, 1, 3))
    x = digit_batches(1)[0]
    assert _search(net, [Call("", (x,), {})])[0] == [""]
    assert _search(net, [Call("", (x,), {}), Call("0", (x,), {})])[0] == ["0", "1"]


@pytest.mark.parametrize("raised", [AssertionError(), ValueError("one line\nanother"), NotImplementedError()])
def test_whatever_the_trace_raises_the_layers_inside_are_tried(raised: Exception) -> None:
    class Refuses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            if not isinstance(x, Tensor):  # torch.fx passes a proxy, which is none
                raise raised
            return self.conv(x)

    names, reasons = _search(Refuses(), [Call("", (digit_batches(1)[0],), {})])
    assert names == ["conv"]
    told = f"{type(raised).__name__}: one line" if raised.args else type(raised).__name__
    assert reasons == {"": f"it cannot be traced and converted ({told})"}


def test_a_layer_whose_weight_is_read_elsewhere_costs_no_other_one() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.b(self.a(x))
            return nn.functional.conv2d(x, self.b.weight)

    model = Reads().eval()
    int8, details = quantize_model(model, digit_batches(1))
    assert details.layers_quantized == ("a",)
    assert details.skipped["b"].startswith("it cannot be calibrated (AttributeError: ")
    with torch.no_grad():
        assert relative(model(digit_batches(1)[0]), int8(digit_batches(1)[0])) < 0.06


def test_layers_inside_a_module_of_torch_are_out_of_reach() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    names, reasons = _search(float_copy(nn.Sequential(layer)), [Call("", (torch.randn(2, 3, 8),), {})], (nn.Linear,))
    assert names == ["0.linear1", "0.linear2"]
    assert "its layers are out of reach inside a module of torch" in reasons[""]


def test_parts_are_calibrated_converted_and_say_what_was_fused() -> None:
    floating = float_copy(ConvNet())
    calls = [Call("", (x,), {}) for x in digit_batches(2)]
    used = used_modules(floating, calls)
    reasons: dict[str, str] = {}
    found = PartSearch(CONVOLUTIONS, used, {""}, quantized_engine(), (), reasons).parts(floating)
    (part,) = calibrated_parts(floating, found, calls, reasons)
    assert part.fused == ["norm1", "norm2"]
    assert part.recipe() == {"name": "", "template": {"x": "<tensor>"}, "is_layer": False, "fused": part.fused}
    int8 = install_part(copy_module(floating), part)
    assert relative_error(replay(floating, calls), replay(int8, calls)) < 0.06
    # the scale of the input is that of all calls: 8 bits less one over the largest and smallest value seen
    low, high = (float(f(torch.stack(digit_batches(2)))) for f in (torch.min, torch.max))
    scale = next(float(value) for name, value in int8.named_buffers() if name == "_scale_0")
    assert scale == pytest.approx((high - low) / 127, rel=0.02)
    assert calibrated_parts(floating, [], calls, reasons) == []


def test_a_part_that_saw_nothing_or_cannot_be_converted_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    floating = float_copy(nn.Sequential(nn.Conv2d(1, 4, 3)))
    x = digit_batches(1)[0]
    calls = [Call("", (x,), {})]
    used, reasons = used_modules(floating, calls), {}
    search = PartSearch(CONVOLUTIONS, used, {""}, quantized_engine(), (), reasons)
    assert calibrated_parts(floating, search.parts(floating), [], reasons) == []
    assert reasons[""] == "2 of its observers saw no value"
    found = search.parts(floating)

    def fails(_: Any) -> Any:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(parts_module, "convert_static", fails)
    assert calibrated_parts(floating, found, calls, reasons) == []
    assert reasons[""] == "torch cannot convert it (RuntimeError: no kernel)"


def test_a_part_from_a_recipe_has_the_structure_and_a_layer_gets_its_holder() -> None:
    floating = float_copy(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU()))
    recipe = {"name": "0", "template": {"input": "<tensor>"}, "is_layer": True, "fused": []}
    part = part_from_recipe(floating, recipe, engine=quantized_engine(), kept_float=())
    result = install_part(copy_module(floating), part)
    assert isinstance(result[0], nn.Sequential)
    assert is_quantized(result[0][0])
    assert isinstance(floating[0], nn.Conv2d)
    left = part_from_recipe(
        floating,
        {**recipe, "is_layer": False, "name": "", "template": {"input": "<tensor>"}},
        engine=quantized_engine(),
        kept_float=("0",),
    )
    assert not any(map(is_quantized, left.graph.modules()))

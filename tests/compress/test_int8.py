"""Which layers become int8, that they compute what they did, and that a recipe repeats it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.nn.quantized import dynamic as int8_dynamic
from torchmetrics import Metric

from lightning_speedkit.compress import load_quantized, quantize_model, save_quantized
from lightning_speedkit.compress.calls import (
    Call,
    replay,
)
from lightning_speedkit.compress.engine import engine_named
from lightning_speedkit.compress.float_copy import float_copy
from lightning_speedkit.compress.int8 import Int8Model, containers, follow_recipe, make_int8, weighted_layers
from lightning_speedkit.compress.quality import (
    relative_error,
)
from lightning_speedkit.errors import QuantizationError
from tests.compress.models import (
    Branching,
    ConvNet,
    digit_batches,
    mlp,
    relative,
)


def test_skip_leaves_the_named_layers_in_float() -> None:
    model = ConvNet().eval()
    int8, details = quantize_model(model, digit_batches(), skip=["head"])
    assert details.layers_quantized == ("conv1", "conv2")
    assert details.skipped == {"head": "named in skip"}
    assert type(int8.get_submodule("head")) is nn.Linear
    int8, details = quantize_model(mlp(), digit_batches(), skip=["1"])
    assert (details.layers_quantized, details.skipped) == (("3",), {"1": "named in skip"})
    with pytest.raises(QuantizationError, match="named in skip"):
        quantize_model(mlp(), digit_batches(), skip=["*"])


def test_layers_that_no_batch_reaches_stay_in_float_and_work() -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, both: bool = False) -> Tensor:
            return self.unused(self.used(x)) if both else self.used(x)

    model, x = Optional().eval(), torch.randn(8, 4)
    int8, details = quantize_model(model, [x])
    assert details.layers_quantized == ("used",)
    assert details.skipped == {"unused": "not called on the calibration batches"}
    with torch.no_grad():
        assert relative(model(x, both=True), int8(x, both=True)) < 0.05


def test_a_weight_that_is_read_directly_is_not_quantized_away() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(self.body(x), self.head.weight)

    model, x = Reads().eval(), torch.randn(8, 4)
    int8, details = quantize_model(model, [x])
    assert details.layers_quantized == ("body",)
    with torch.no_grad():
        assert relative(model(x), int8(x)) < 0.05


def test_shared_layers_are_replaced_under_every_name() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.second = self.first

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.relu(self.first(x)))

    model, x = Tied().eval(), torch.randn(8, 6)
    int8, _ = quantize_model(model, [x])
    assert int8.first is int8.second
    assert isinstance(int8.first, int8_dynamic.Linear)


_ACTIVATIONS = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish,
    nn.Hardsigmoid, nn.Hardtanh, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Softsign, nn.Identity,
)  # fmt: skip
_BETWEEN: dict[str, nn.Module] = {
    **{kind.__name__: kind() for kind in _ACTIVATIONS},
    "BatchNorm": nn.BatchNorm2d(4),
    "GroupNorm": nn.GroupNorm(2, 4),
    "InstanceNorm": nn.InstanceNorm2d(4, affine=True),
    "InstanceNorm with statistics": nn.InstanceNorm2d(4, track_running_stats=True),
    "LayerNorm": nn.LayerNorm([4, 6, 6]),
    "RMSNorm": nn.RMSNorm(6),
    "MaxPool": nn.MaxPool2d(2),
    "Upsample": nn.Upsample(scale_factor=2),
    "PixelShuffle": nn.Sequential(nn.PixelShuffle(2), nn.Conv2d(1, 4, 1)),
    "pad": nn.ZeroPad2d(1),
    "Dropout": nn.Dropout2d(),
}


def _other_weights(model: nn.Module) -> nn.Module:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for value in (*other.parameters(), *other.buffers()):
            if value.is_floating_point():
                value.normal_().abs_()
    return other


def _checked(model: nn.Module, x: Tensor, tmp_path: Path, limit: float = 0.08) -> Int8Model:
    """Quantized statically: as far from the float model as roundings are, and equal again in a model read anew."""
    floating = float_copy(model)
    calls = [Call("", (x,), {})]
    made = make_int8(floating, calls, method="static")
    assert relative_error(replay(floating, calls), replay(made.module, calls)) < limit
    save_quantized(made.module, made.recipe, tmp_path / "model.pt")
    again = load_quantized(tmp_path, _other_weights(model))
    torch.testing.assert_close(replay(again, calls), replay(made.module, calls), rtol=0, atol=0)
    return made


@pytest.mark.parametrize("name", _BETWEEN)
def test_layers_between_convolutions_compute_what_they_did(name: str, tmp_path: Path) -> None:
    between = _BETWEEN[name]
    if name == "InstanceNorm with statistics":
        between.running_mean.normal_()
    model = nn.Sequential(nn.Conv2d(4, 4, 3), between, nn.Conv2d(4, 4, 3)).eval()
    made = _checked(model, torch.randn(16, 4, 8, 8), tmp_path)
    assert {"0", "2"} <= set(made.quantized)


class _Applied(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 1)
        self.square, self.vector = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.rand(4))
        self.kernel, self.function = nn.Parameter(torch.randn(4, 4, 3, 3)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.function(self, self.a(x), self.b(x)))


_F = nn.functional
_FUNCTIONS: dict[str, Any] = {
    "add and relu": lambda m, a, b: torch.relu(a + b),
    "add in place": lambda m, a, b: a.add_(b).relu_(),
    "multiply": lambda m, a, b: a * b,
    "subtract": lambda m, a, b: a - b,
    "number": lambda m, a, b: (a + b) * -2.0 + 1.5,
    "concatenate": lambda m, a, b: torch.cat([a, b], 1)[:, 2:6],
    "matmul": lambda m, a, b: torch.matmul(a, b),
    "squeeze and excite": lambda m, a, b: a * torch.sigmoid(b.mean((2, 3), keepdim=True)),
    "elu": lambda m, a, b: _F.elu(a + b),
    "prelu": lambda m, a, b: _F.prelu(a + b, m.vector),
    "linear by a parameter": lambda m, a, b: _F.relu(_F.linear(a + b, m.square)),
    "convolution by a parameter": lambda m, a, b: _F.conv2d(a + b, m.kernel, m.vector, padding=1),
    "scale by a parameter": lambda m, a, b: (a + b) * m.vector.view(1, -1, 1, 1),
    "instance norm": lambda m, a, b: _F.instance_norm(a + b),
    "attention": lambda m, a, b: _F.scaled_dot_product_attention(a, b, b),
    "permute": lambda m, a, b: (a + b).permute(0, 1, 3, 2).contiguous(),
}


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_functions_between_convolutions_compute_what_they_did(name: str, tmp_path: Path) -> None:
    made = _checked(_Applied(_FUNCTIONS[name]).eval(), torch.randn(16, 4, 8, 8), tmp_path)
    assert made.quantized == ("a", "b", "c")


@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("channels", [(2, 4, 1), (4, 2, 1), (4, 4, 1), (4, 4, 4), (4, 8, 2), (8, 4, 4)])
def test_a_convolution_is_right_or_left_in_float(
    dimensions: int, transposed: bool, channels: tuple[int, int, int], tmp_path: Path
) -> None:
    kind = getattr(nn, f"Conv{'Transpose' if transposed else ''}{dimensions}d")
    into, out, groups = channels
    # a second one, so that there is something to quantize in any case
    model = nn.Sequential(kind(into, out, 3, stride=2, groups=groups), getattr(nn, f"Conv{dimensions}d")(out, 2, 1))
    made = _checked(model, torch.randn(8, into, *[5] * dimensions), tmp_path)
    if not transposed or into == out:
        assert made.quantized == ("0", "1")
    elif made.recipe["engine"] in ("x86", "onednn"):
        assert "computes a transposed convolution wrongly" in made.skipped["0"]


@pytest.mark.parametrize("options", [{"dilation": 2}, {"padding": "same"}, {"padding": "valid"}, {"bias": False}])
def test_options_of_convolutions(options: dict[str, Any], tmp_path: Path) -> None:
    made = _checked(nn.Sequential(nn.Conv2d(1, 4, 3, **options)), torch.randn(16, 1, 8, 8), tmp_path)
    assert made.quantized == ("0",)


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (nn.Conv2d(4, 4, 2, padding="same"), "padding='same' that is larger on one side has no int8 version"),
        (nn.Conv2d(4, 4, 3, padding_mode="replicate"), "padding_mode='replicate' has no int8 version"),
    ],
)
def test_a_convolution_without_int8_version_costs_no_other_one(layer: nn.Module, why: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), layer, nn.ReLU(), nn.Conv2d(4, 2, 3))
    made = _checked(model, torch.randn(16, 1, 8, 8), tmp_path)
    assert (made.quantized, made.skipped) == (("0", "3"), {"1": why})


def test_weighted_layers_are_those_with_a_matrix_outside_of_metrics() -> None:
    class Distance(Metric):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 2)

        def update(self) -> None: ...

        def compute(self) -> Tensor:
            return torch.tensor(0.0)

    root = nn.ModuleDict({"fc": nn.Linear(2, 2), "norm": nn.LayerNorm(2), "emb": nn.Embedding(2, 2), "m": Distance()})
    assert list(weighted_layers(root)) == ["fc", "emb"]


def test_a_recipe_gives_the_structure_and_asks_for_equal_shapes() -> None:
    model = float_copy(ConvNet())
    made = make_int8(model, [Call("", (x,), {}) for x in digit_batches(1)], method="static")
    again = follow_recipe(float_copy(ConvNet()), made.recipe)
    assert [type(m).__name__ for m in again.modules()] == [type(m).__name__ for m in made.module.modules()]
    other = ConvNet()
    other.head = nn.Linear(256, 7)
    with pytest.raises(QuantizationError, match=r"parameter 'head.weight' has shape \(7, 256\), in the file \(10, "):
        follow_recipe(float_copy(other), made.recipe)
    other = ConvNet()
    other.extra = nn.Linear(1, 1)
    with pytest.raises(QuantizationError, match=r"parameter 'extra.weight' is not in the file"):
        follow_recipe(float_copy(other), made.recipe)


@pytest.mark.parametrize(
    ("method", "layer", "why"),
    [
        ("dynamic", nn.Conv2d(1, 1, 3), "Conv2d has no dynamic int8 version"),
        ("dynamic", nn.Embedding(3, 2), "Embedding has no dynamic int8 version"),
        ("static", nn.Sequential(nn.LSTM(8, 2)), "outside the int8 parts"),
    ],
)
def test_every_layer_that_stays_has_its_reason(method: str, layer: nn.Module, why: str) -> None:
    x = torch.ones(1, 2, dtype=torch.long) if isinstance(layer, nn.Embedding) else torch.ones(2, 1, 8, 8)
    if isinstance(layer, nn.Sequential):
        x = x[:, 0]
    made = make_int8(float_copy(layer), [Call("", (x,), {})], method=method)
    assert (made.quantized, list(made.skipped.values())) == ((), [why])


def test_a_net_of_two_methods_has_both_in_its_recipe() -> None:
    made = make_int8(float_copy(Branching()), [Call("", (x,), {}) for x in digit_batches(1)], method="static+dynamic")
    assert [entry["name"] for entry in made.recipe["static"]] == ["block"]
    assert made.recipe["dynamic"] == ["head"]


class _Positions(nn.Module):
    """Adds a raw parameter beside its layers, as transformers do with positions; one block does, too."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, 6, 16))
        self.block = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.block.token = nn.Parameter(torch.randn(1, 1, 16))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x + self.positions) + self.block.token)


class _RawWeight(nn.Module):
    """A layer that is no class of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x @ self.weight)


@pytest.mark.parametrize(
    ("network", "found"),
    [
        (_Positions(), {"", "block"}),
        (nn.Sequential(_RawWeight()), set()),
        (_RawWeight(), set()),
        (nn.MultiheadAttention(4, 2), set()),
        (nn.TransformerEncoderLayer(4, 2), set()),
        (nn.Linear(2, 1), set()),
    ],
)
def test_what_holds_a_raw_parameter_beside_layers_is_no_layer(network: nn.Module, found: set[str]) -> None:
    assert containers(network) == found
    assert containers(network) <= weighted_layers(network).keys()


@pytest.mark.parametrize(
    "backend",
    ["onnxruntime-static", "onnxruntime-dynamic", "torch-ao-static", "torch-ao-dynamic", "torchao-weight-int8"],
)
def test_no_engine_counts_a_container_as_a_layer(backend: str) -> None:
    torch.manual_seed(0)
    network, calls = float_copy(_Positions()), [Call("", (torch.randn(8, 6, 16),), {}) for _ in range(2)]
    engine = engine_named(backend)
    if (missing := engine.missing("cpu")) is not None:
        pytest.skip(missing)
    made = engine.convert(network, calls, skip=["head"])
    assert (made.quantized, list(made.skipped)) == (("block.0",), ["head"])
    with pytest.raises(QuantizationError) as refusal:
        engine.convert(network, calls, skip=["*"])
    assert "'': " not in str(refusal.value)
    assert "raw" not in str(refusal.value)

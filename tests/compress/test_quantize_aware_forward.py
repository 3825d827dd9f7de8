"""How one layer computes with rounded numbers, and that it becomes plain again."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import nn

from lightning_speedkit.compress.quantize_aware_forward import Rounding, Switch, change, change_back, layer_kind
from lightning_speedkit.compress.quantize_aware_numbers import WeightGrid, update_ranges

EXACT: dict[str, Any] = {"rtol": 0, "atol": 0}


def _changed(layer: nn.Module, scheme: str = "weight-only-int8", bits: int | None = 4, on: bool = True) -> Rounding:
    switch = Switch()
    switch.is_on = on
    rounding = Rounding(switch, layer, scheme, bits, None)
    change(layer, rounding)
    return rounding


@pytest.mark.parametrize(
    ("scheme", "weight_bits", "group", "full", "activation_bits"),
    [
        ("static-int8", 7, None, False, 8),
        ("dynamic-int8", 7, None, False, 8),
        ("weight-only-int8", 8, None, True, None),
        ("weight-only-int4", 4, 32, True, None),
    ],
)
def test_bits_of_a_scheme(
    scheme: str, weight_bits: int, group: int | None, full: bool, activation_bits: int | None
) -> None:
    rounding = Rounding(Switch(), nn.Linear(32, 2), scheme, None, None)
    assert rounding.weight == WeightGrid(weight_bits, axis=0, group=group, full=full)
    assert rounding.activation_bits == activation_bits
    assert (rounding.range is not None) == (scheme == "static-int8")
    given = Rounding(Switch(), nn.ConvTranspose1d(2, 2, 1), "static-int8", 3, 5)
    assert (given.weight.bits, given.weight.axis, given.activation_bits) == (3, 1, 5)
    assert given.range is not None
    assert given.range.bits == 5


def test_what_is_no_floating_point_tensor_is_not_rounded() -> None:
    rounding = Rounding(Switch(), nn.Linear(2, 2), "dynamic-int8", None, None)
    numbers = torch.tensor([1, 1000])
    assert rounding.input(numbers) is numbers
    assert rounding.input(None) is None  # type: ignore[arg-type]


def test_the_range_moves_only_while_it_is_observed() -> None:
    rounding = Rounding(Switch(), nn.Linear(2, 2), "static-int8", None, None)
    assert rounding.range is not None
    rounding.input(torch.tensor([0.0, 7.0]))
    update_ranges([rounding.range])
    assert not rounding.range.known
    rounding.switch.observes = True
    rounding.input(torch.tensor([0.0, 7.0]))
    update_ranges([rounding.range])
    assert rounding.range.high.item() == 7.0


def test_a_changed_layer_rounds_while_it_is_on_and_is_plain_afterwards() -> None:
    layer = nn.Linear(2, 1, bias=False)
    layer.weight.data = torch.tensor([[7.5, 1.4]])  # 4 bits, full: scale 1
    names, signature = list(layer.state_dict()), inspect.signature(layer.forward)
    weight = layer.weight
    rounding = _changed(layer, on=False)
    x = torch.tensor([[0.0, 1.0]])
    torch.testing.assert_close(layer(input=x), torch.tensor([[1.4]]))
    rounding.switch.is_on = True
    torch.testing.assert_close(layer(input=x), torch.tensor([[1.0]]))
    assert (type(layer).__name__, isinstance(layer, nn.Linear), layer.weight is weight) == ("Linear", True, True)
    assert (list(layer.state_dict()), inspect.signature(layer.forward)) == (names, signature)
    change_back(layer)
    change_back(layer)
    assert type(layer) is nn.Linear
    torch.testing.assert_close(layer(x), torch.tensor([[1.4]]))


def test_layers_of_a_kind_share_one_class_and_copies_are_plain() -> None:
    one, other = nn.Linear(2, 2), nn.Linear(3, 3)
    _changed(one)
    _changed(other)
    assert type(one) is type(other)
    twin = copy.deepcopy(one)
    assert type(twin) is nn.Linear
    torch.testing.assert_close(twin(torch.eye(2)), one.weight.T + one.bias)


def test_a_transposed_convolution_takes_its_output_size() -> None:
    torch.manual_seed(0)
    layer = nn.ConvTranspose2d(3, 2, 3, stride=2, bias=False)
    x = torch.randn(1, 3, 4, 4)
    rounded = WeightGrid(4, axis=1, full=True)(layer.weight.detach())
    by_hand = nn.functional.conv_transpose2d(x, rounded, stride=2, output_padding=1)
    _changed(layer)
    torch.testing.assert_close(layer(x, output_size=[10, 10]), by_hand)
    torch.testing.assert_close(layer(x, [10, 10]), by_hand)
    assert isinstance(layer.weight, nn.Parameter)


@pytest.mark.parametrize("apart", [False, True], ids=["one-weight", "three-weights"])
def test_attention_takes_its_arguments_by_name(apart: bool) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"kdim": 6, "vdim": 5} if apart else {}
    layer, twin = (nn.MultiheadAttention(8, 2, batch_first=True, **sizes) for _ in range(2))
    grid = WeightGrid(4, full=True)
    twin.load_state_dict({k: grid(v) if v.ndim == 2 else v for k, v in layer.state_dict().items()})
    inputs = [torch.randn(2, 3, size) for size in (8, sizes.get("kdim", 8), sizes.get("vdim", 8))]
    mask = torch.tensor([[False, False, True], [False, True, True]])
    _changed(layer)
    wanted = twin(*inputs, key_padding_mask=mask, need_weights=False)[0]
    named = dict(zip(("query", "key", "value"), inputs, strict=True))
    torch.testing.assert_close(layer(**named, key_padding_mask=mask, need_weights=False)[0], wanted, **EXACT)
    torch.testing.assert_close(layer(*inputs, mask, False)[0], wanted, **EXACT)
    with pytest.raises(TypeError, match="value"):
        layer(inputs[0], inputs[1])
    assert all(isinstance(p, nn.Parameter) for p in (layer.out_proj.weight, *layer.parameters()))


def test_the_kind_of_a_subclass_is_that_of_its_parent() -> None:
    class Own(nn.Conv2d):
        pass

    assert layer_kind(Own(1, 1, 1)) is nn.Conv2d

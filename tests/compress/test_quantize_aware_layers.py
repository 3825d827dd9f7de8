"""Which layers of a network are rounded, and what is kept of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_speedkit.compress.quantize_aware_layers import FakeQuantization, check_fake_scheme

EXACT: dict[str, Any] = {"rtol": 0, "atol": 0}


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 3)
        self.body = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 20))
        self.attention = nn.MultiheadAttention(32, 2)
        self.norm = nn.LayerNorm(32)


def test_each_scheme_takes_the_layers_that_its_engine_has() -> None:
    attention = ("attention", "attention.out_proj")
    for scheme in ("dynamic-int8", "weight-only-int8", "weight-only-int4"):
        fake = FakeQuantization(_Net(), scheme)
        assert fake.layers == ("body.0", "body.2", *attention)
        assert fake.skipped == {"conv": f"{scheme} leaves convolutions in float"}
    assert FakeQuantization(_Net()).layers == ("conv", "body.0", "body.2", *attention)
    odd = FakeQuantization(nn.Linear(20, 32), "weight-only-int4")
    assert (odd.layers, odd.skipped) == ((), {"": "its inputs cannot be divided into groups of 32"})


def test_skip_names_modules_and_all_inside_them() -> None:
    assert FakeQuantization(_Net(), skip=["body", "conv"]).layers == ("attention", "attention.out_proj")
    assert FakeQuantization(_Net(), skip=["*.2", "att*"]).layers == ("conv", "body.0")
    fake = FakeQuantization(_Net(), skip=["attention.out_proj"])
    assert "attention" in fake.layers
    assert fake.skipped == {"attention.out_proj": "named in skip"}


def test_ranges_go_to_another_network_through_the_state() -> None:
    torch.manual_seed(0)
    net, twin = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    twin.load_state_dict(net.state_dict())
    fake, other = FakeQuantization(net, activation_bits=3), FakeQuantization(twin, activation_bits=3)
    fake.switch_on()
    assert fake.observes
    net(torch.tensor([[-1.0, 2.5]]))
    assert fake.ranges == {}  # until the batch is done
    fake.update()
    assert fake.ranges["0"] == (-1.0, 2.5)
    state = fake.state_dict()
    assert list(state) == ["0", "1"]
    other.load_state_dict({**state, "gone": torch.zeros(2)})
    other.switch_on(observe=False)
    assert not other.observes
    x = torch.tensor([[0.3, 9.0]])
    torch.testing.assert_close(twin(x), net(x), **EXACT)
    other.update()
    assert other.ranges == {"0": (-1.0, 2.5), "1": fake.ranges["1"]}


def test_encoder_layers_read_no_weights_behind_its_back_while_it_is_on() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8), 2, enable_nested_tensor=False)
    before = [layer.activation_relu_or_gelu for layer in encoder.layers]
    fake = FakeQuantization(encoder)
    fake.switch_on()
    assert [layer.activation_relu_or_gelu for layer in encoder.layers] == [0, 0]
    fake.switch_off()
    assert [layer.activation_relu_or_gelu for layer in encoder.layers] == before == [1, 1]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("static-int4", None, None), "got 'static-int4'"),
        (("static-int8", 1, None), "weight_bits=1 is not allowed"),
        (("static-int8", True, None), "weight_bits=True is not allowed"),
        (("dynamic-int8", None, 9), "activation_bits=9 is not allowed"),
        (("weight-only-int4", None, 8), "rounds weights only"),
    ],
)
def test_schemes_and_bits_that_are_not_allowed(arguments: tuple[Any, Any, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        check_fake_scheme(*arguments)


def test_schemes_and_bits_that_are_allowed() -> None:
    check_fake_scheme("static-int8", 2, 8)
    check_fake_scheme("weight-only-int4", None, None)


def test_a_name_in_skip_that_matches_nothing_is_an_error_and_compiled_ones_match() -> None:
    with pytest.raises(ValueError, match=r"skip='bodi' matches no module.*Did you mean 'body'"):
        FakeQuantization(_Net(), skip=["bodi"])
    compiled = nn.Sequential(torch.compile(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), backend="eager"))
    fake = FakeQuantization(compiled, skip=["0.1"])
    assert fake.layers == ("0._orig_mod.0",)
    fake.remove()

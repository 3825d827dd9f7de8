from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from lightning_speedkit.compress.calls import Call
from lightning_speedkit.compress.shrink_graph import find_groups
from lightning_speedkit.errors import MissingExtraError, SpeedkitError
from tests.compress.shrink_models import Grouped, Residual, Transformer, images, randomised

CALLS = [Call("", (images(),), {})]


def test_channels_of_a_residual_sum_are_one_group_with_every_tensor_they_run_through() -> None:
    groups, reasons = find_groups(randomised(Residual()), CALLS)
    stem = next(group for group in groups if group.name == "stem")
    assert {(part.tensor, part.dim, part.reads) for part in stem.parts} == {
        ("stem.weight", 0, False),
        *((f"norm.{leaf}", 0, False) for leaf in ("weight", "bias", "running_mean", "running_var")),
        ("inner.weight", 1, True),
        ("outer.weight", 0, False),
        ("outer.bias", 0, False),
        ("second.weight", 1, True),
        ("second.weight", 0, False),
        ("second.bias", 0, False),
        ("head.weight", 1, True),
    }
    head = next(part for part in stem.parts if part.tensor == "head.weight")
    assert set(head.pairs) == {(4 * channel + place, channel) for channel in range(8) for place in range(4)}
    assert stem.tied == tuple((channel,) for channel in range(8))
    assert reasons == {"head": "its channels are an output of the network or the input of a recurrent layer"}


def test_channels_with_one_place_in_the_groups_of_a_convolution_are_tied() -> None:
    groups, _ = find_groups(randomised(Grouped()), CALLS)
    tied = {group.name: group.tied for group in groups}
    assert tied["first"] == tuple((i, i + 4, i + 8) for i in range(4))  # three groups of four inputs
    assert tied["grouped"] == tuple(tuple(range(i, 24, 4)) for i in range(4))  # 8 outputs each, read by twelves
    assert tied["other"] == tuple((i, i + 4) for i in range(4))


def test_the_model_is_left_as_it_was() -> None:
    model = randomised(Transformer()).requires_grad_(False)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    find_groups(model, CALLS)
    torch.testing.assert_close(dict(model.state_dict()), kept, rtol=0, atol=0)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_skip_holds_outputs_and_what_is_tied_to_them() -> None:
    _, reasons = find_groups(randomised(Residual()), CALLS, skip=["sec*"])
    assert reasons["stem"] == "tied to second, which is named in skip"
    groups, _ = find_groups(randomised(Transformer()), CALLS, skip=["attention"])
    assert [group.kind for group in groups] == ["channels"]


def test_without_the_engine_the_pip_line_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_pruning", None)
    with pytest.raises(MissingExtraError, match=r"torch-pruning, .*pip install 'lightning-speedkit\[prune\]'"):
        find_groups(randomised(Residual()), CALLS)


def test_a_network_that_cannot_be_followed_is_named() -> None:
    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).detach()

    with pytest.raises(SpeedkitError, match=r"The graph of Detached could not be followed .*no output depends on"):
        find_groups(Detached(), CALLS)


def test_skip_holds_what_is_inside_a_named_module() -> None:
    net = nn.Sequential(nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 6)), nn.Linear(6, 4), nn.Linear(4, 2))
    groups, reasons = find_groups(randomised(net), [Call("", (torch.ones(2, 8),), {})], skip=["0"])
    assert [group.name for group in groups] == ["1"]
    assert (reasons["0.0"], reasons["0.1"]) == ("named in skip", "named in skip")

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_speedkit.compress import shrink_check
from lightning_speedkit.compress.calls import Call
from lightning_speedkit.compress.shrink_check import hidden_copy, unsound_groups
from lightning_speedkit.compress.shrink_graph import ChannelGroup, TensorPart

CALLS = [Call("", (torch.randn(4, 3, generator=torch.Generator().manual_seed(0)),), {})]


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).eval()


def _group(name: str, reader: str, shift: int = 0) -> ChannelGroup:
    pairs = tuple((i, i) for i in range(4))
    read = tuple(((i + shift) % 4, i) for i in range(4))
    parts = (TensorPart(f"{name}.weight", 0, pairs), TensorPart(f"{name}.bias", 0, pairs))
    single = tuple((i,) for i in range(4))
    return ChannelGroup(
        name, "channels", 4, (*parts, TensorPart(f"{reader}.weight", 1, read, True)), single, exact=True
    )


def test_zeros_hide_the_channels_from_what_reads_them() -> None:
    net = _net()
    twin = hidden_copy(net, [_group("0", "2")], {"0": (1,)})
    expected = net[2].weight.detach().clone()
    expected[:, 1] = 0
    torch.testing.assert_close(twin[2].weight, expected, rtol=0, atol=0)
    assert bool((net[2].weight[:, 1] != 0).all())


def test_a_wrong_index_is_found_and_the_right_groups_stay() -> None:
    right, wrong = _group("0", "2"), _group("2", "4", shift=1)
    gone = {"0": (0, 2), "2": (0, 1)}
    assert unsound_groups(_net(), CALLS, [right, _group("2", "4")], gone) == {}
    reasons = unsound_groups(_net(), CALLS, [right, wrong], gone)
    assert list(reasons) == ["2"]
    assert "the rest computes something else" in reasons["2"]


def test_sizes_that_do_not_fit_are_found() -> None:
    half = ChannelGroup("0", "channels", 4, _group("0", "2").parts[:2], ((0,), (1,), (2,), (3,)), exact=True)
    assert "does not run (RuntimeError" in unsound_groups(_net(), CALLS, [half], {"0": (0,)})["0"]


def test_nothing_is_run_if_nothing_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shrink_check, "replay", None)
    assert unsound_groups(_net(), CALLS, [_group("0", "2")], {"0": ()}) == {}


def test_a_fault_behind_dead_units_is_found() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    with torch.no_grad():
        net[2].bias.fill_(-100.0)  # nothing of the first layer reaches the output
    assert list(unsound_groups(net, CALLS, [_group("0", "2", shift=1)], {"0": (0, 1)})) == ["0"]
    assert unsound_groups(net, CALLS, [_group("0", "2")], {"0": (0, 1)}) == {}

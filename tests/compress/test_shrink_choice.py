from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_speedkit.compress.shrink_choice import channel_scores, choose_channels, cuts_of, kept_count
from lightning_speedkit.compress.shrink_graph import ChannelGroup, TensorPart


def _group(tied: tuple[tuple[int, ...], ...] = ((0,), (1,), (2,), (3,))) -> ChannelGroup:
    pairs = tuple((i, i) for i in range(4))
    parts = (
        TensorPart("0.weight", 0, pairs),
        TensorPart("0.bias", 0, pairs),
        TensorPart("1.weight", 1, pairs, reads=True),
    )
    return ChannelGroup("0", "channels", 4, parts, tied, exact=True)


def _net() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1))
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[1.0], [2.0], [3.0], [4.0]]))
        net[1].weight.copy_(torch.tensor([[4.0, 1.0, 1.0, 1.0]]))
    return net


def test_magnitude_gives_each_tensor_one_vote() -> None:
    # squares 1, 4, 9, 16 over their mean 7.5, and 16, 1, 1, 1 over 4.75; the bias has no vote
    expected = [1 / 7.5 + 16 / 4.75, 4 / 7.5 + 1 / 4.75, 9 / 7.5 + 1 / 4.75, 16 / 7.5 + 1 / 4.75]
    assert channel_scores(_net(), _group(), "magnitude").tolist() == pytest.approx(expected)
    assert choose_channels(_net(), _group(), 0.5, original=4) == (1, 2)


def test_taylor_is_the_first_order_change_of_the_loss() -> None:
    gradients = {
        "0.weight": torch.tensor([[1.0], [0.0], [-2.0], [0.5]]),
        "1.weight": torch.tensor([[0.0, 3.0, 0.0, 0.0]]),
    }
    assert channel_scores(_net(), _group(), "taylor", gradients).tolist() == [1.0, 3.0, 6.0, 2.0]
    assert choose_channels(_net(), _group(), 0.5, original=4, criterion="taylor", gradients=gradients) == (0, 3)


def test_random_is_the_same_each_time_and_leaves_the_global_state() -> None:
    net, state = _net(), torch.get_rng_state()
    one, other = (channel_scores(net, _group(), "random") for _ in range(2))
    assert torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_tied_channels_go_together_or_not_at_all() -> None:
    assert choose_channels(_net(), _group(((0, 3), (1, 2))), 0.5, original=4) == (1, 2)
    assert choose_channels(_net(), _group(((0, 1, 2, 3),)), 0.5, original=4) == ()


def test_what_went_before_counts() -> None:
    assert choose_channels(_net(), _group(), 0.5, original=8) == ()
    assert len(choose_channels(_net(), _group(), 0.75, original=8)) == 2


def test_cuts_name_what_stays() -> None:
    cuts = cuts_of(_net(), [_group()], {"0": (1, 2)})
    assert cuts == {"0.weight": {0: [0, 3]}, "0.bias": {0: [0, 3]}, "1.weight": {1: [0, 3]}}
    assert cuts_of(_net(), [_group()], {}) == {}


@given(st.integers(1, 500), st.floats(0, 0.999), st.integers(1, 9), st.integers(1, 9))
def test_never_more_than_the_ratio_goes_and_never_all(channels: int, ratio: float, size: int, round_to: int) -> None:
    keep = kept_count(channels, ratio, size=size, round_to=round_to)
    assert 1 <= keep <= channels
    assert keep >= channels * (1 - ratio) - 1e-6
    if keep < channels:
        assert keep % round_to == keep % size == 0

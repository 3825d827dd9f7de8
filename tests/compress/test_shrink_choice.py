from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_speedkit.compress.shrink_choice import (
    channel_scores,
    choose_channels,
    cuts_of,
    kept_count,
    why_none_goes,
)
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


@pytest.mark.parametrize(
    ("tied", "kind", "ratio", "round_to", "told"),
    [
        (None, "channels", 0.1, 1, "ratio=0.1 of its 4 channels is less than go at a time; 0.25 or more removes some"),
        (None, "heads", 0.2, 8, "head_ratio=0.2 of its 4 heads is less than go at a time; 0.25 or more removes some"),
        (((0, 3), (1, 2)), "channels", 0.3, 1, "ratio=0.3 of its 4 channels is less than go at a time; 0.5 or more"),
        (None, "channels", 0.3, 2, "ratio=0.3 of its 4 channels is less than go at a time; 0.5 or more"),
        (None, "channels", 0.9, 8, "round_to=8 keeps all of its 4 channels"),
        (((0, 1, 2, 3),), "channels", 0.5, 1, "too few channels: 4, of which 4 go at a time"),
    ],
)
def test_where_none_goes_the_reason_is_the_ratio_or_the_layer(
    tied: tuple[tuple[int, ...], ...] | None, kind: str, ratio: float, round_to: int, told: str
) -> None:
    group = dataclasses.replace(_group(tied) if tied else _group(), kind=kind)
    assert choose_channels(_net(), group, ratio, original=4, round_to=round_to) == ()
    assert why_none_goes(group, ratio, original=4, round_to=round_to).startswith(told)


@given(st.integers(2, 200), st.integers(1, 4), st.integers(1, 9))
def test_the_ratio_that_is_named_removes_some(channels: int, together: int, round_to: int) -> None:
    tied = tuple(tuple(range(i, min(i + together, channels))) for i in range(0, channels, together))
    group = ChannelGroup("0", "channels", channels, (), tied, exact=True)
    told = why_none_goes(group, 0.0, original=channels, round_to=round_to)
    if " or more" in told:
        least = float(told.split("; ")[1].split()[0])
        assert kept_count(channels, least, size=together, round_to=round_to) < channels
        assert kept_count(channels, least - 0.002, size=together, round_to=round_to) == channels


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

"""Cut networks compute what the whole ones compute with zeros where the removed channels were read."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_speedkit.compress.calls import Call
from lightning_speedkit.compress.shrink_plan import ShrinkSettings, few_samples, plan_shrink
from lightning_speedkit.compress.shrink_sizes import cut
from tests.compress.shrink_models import (
    Grouped,
    Joining,
    Mobile,
    Residual,
    Transformer,
    images,
    plan_of,
    randomised,
    with_zeros,
)

CASES = {
    "residual": (
        Residual,
        {"inner": (12, 6), "stem": (8, 4)},
        {"inner.weight": 1, "outer.weight": 1, "second.weight": 1, "head.weight": 1},
    ),
    "depthwise": (Mobile, {"expand": (16, 8), "squeeze": (4, 2), "project": (6, 3)}, None),
    "grouped": (Grouped, {"first": (12, 6), "grouped": (24, 12), "other": (8, 4)}, None),
    "joining": (Joining, {"left": (6, 3), "right": (10, 5), "up": (8, 4), "join": (12, 6)}, None),
    "units": (Transformer, {"up": (32, 16)}, {"down.weight": 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_rest_computes_what_it_computed_with_zeros(case: str) -> None:
    make, layers, readers = CASES[case]
    model = randomised(make())
    plan = plan_of(model)
    assert dict(plan.layers) == layers
    small = copy.deepcopy(model)
    cut(small, plan.cuts)
    if readers is None:  # every weight whose inputs were cut reads them; a grouped one reads its own share
        readers = {n: 0 if isinstance(model.get_submodule(n[:-7]), nn.ConvTranspose2d) else 1 for n in _reading(plan)}
    expected = with_zeros(model, readers, plan.cuts)(images())
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(small(images()), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(small(images()), model(images()), rtol=1e-2)
    small.train()(images()).sum().backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in small.parameters())


def _reading(plan: object) -> list[str]:
    up = {"up.weight"}  # a transposed convolution has its inputs in dimension 0
    return [
        name
        for name, dims in plan.cuts.items()  # type: ignore[attr-defined]
        if name.endswith("weight") and ((1 in dims and name not in up) or (name in up and 0 in dims))
    ]


def test_grouped_convolutions_keep_groups_of_one_size() -> None:
    model = randomised(Grouped())
    plan = plan_of(model)
    cut(model, plan.cuts)
    assert (model.grouped.in_channels, model.grouped.out_channels, model.grouped.groups) == (6, 12, 3)
    assert model.grouped.weight.shape == (12, 2, 3, 3)
    assert (model.other.in_channels, model.other.out_channels, model.other.groups) == (12, 8 // 2, 2)


@pytest.mark.parametrize("fused", [True, False])
def test_whole_heads_go_with_their_rows_and_columns(fused: bool) -> None:
    model = randomised(Transformer(fused))
    plan = plan_of(model, 0.0, head_ratio=0.5)
    assert dict(plan.layers) == {"attention": (4, 2)}
    assert not [name for name in plan.skipped if name.startswith("attention.") and name != "attention.proj"]
    small = copy.deepcopy(model)
    cut(small, plan.cuts)
    columns = plan.cuts["attention.proj.weight"][1]
    kept = sorted({column // 4 for column in columns})
    assert columns == [4 * head + i for head in kept for i in range(4)]
    assert small.attention.num_heads == 2
    expected = with_zeros(model, {"attention.proj.weight": 1}, plan.cuts)(images())
    torch.testing.assert_close(small(images()), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "it makes the heads of an attention; head_ratio removes whole ones"),
        ({"head_ratio": 0.1}, "it makes the heads of an attention"),
        ({"head_ratio": 0.5, "skip": ("attention",)}, ""),
    ],
)
def test_an_attention_that_keeps_its_heads_is_told(fused: bool, settings: dict[str, Any], told: str) -> None:
    plan = plan_of(randomised(Transformer(fused)), 0.5, **settings)
    assert "attention" not in plan.layers
    assert told in plan.skipped["attention.qkv" if fused else "attention.q_proj"]
    if settings.get("head_ratio") == 0.1:
        assert plan.skipped["attention"] == (
            "head_ratio=0.1 of its 4 heads is less than go at a time; 0.25 or more removes some"
        )


def test_the_width_of_a_transformer_goes_only_if_norms_may_average_over_fewer() -> None:
    model = randomised(Transformer())
    plan = plan_of(model)
    assert "averages over its channels; across_norms=True removes them too" in plan.skipped["embed"]
    plan = plan_of(model, across_norms=True)
    assert dict(plan.layers) == {"up": (32, 16), "embed": (16, 8)}
    cut(model, plan.cuts)
    assert model.norm1.normalized_shape == (8,)
    assert model.position.shape == (1, 8, 8)
    assert model.attention.qkv.weight.shape == (48, 8)
    assert bool(torch.isfinite(model(images())).all())


class Shuffled(nn.Module):
    """Reorders channels by a reshape, which autograd's graph does not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 6, 3), nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x.view(len(x), 2, -1, *x.shape[2:]).transpose(1, 2).flatten(1, 2)
        return self.head(self.second(torch.relu(x)).mean((2, 3)))


class Baked(nn.Module):
    """Has a width written into its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 12), nn.Linear(12, 6), nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x.squeeze(1))).view(-1, 8, 12)
        return self.head(torch.relu(self.second(x)).mean(1))


class Normalised(nn.Module):
    """Divides by a norm over the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 6, 3), nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.normalize(self.first(x), dim=1)
        return self.head(torch.relu(self.second(x)).mean((2, 3)))


class Auxiliary(nn.Module):
    """Has a second head that only runs in training."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 6, 3), nn.Linear(6, 10)
        self.extra = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        if self.training:
            self.extra(x)
        return self.head(torch.relu(self.second(x)).mean((2, 3)))


class Reader(nn.Module):
    """A linear layer before a recurrent one."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.rnn, self.head = nn.Linear(8, 12), kind(12, 6, batch_first=True), nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.first(x.squeeze(1)))[0][:, -1])


class Shared(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 6)
        self.second.weight = self.first.weight
        self.head = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.second(torch.relu(self.first(x.squeeze(1)))))
        return self.head(torch.relu(self.third(x)).flatten(1))


@pytest.mark.parametrize(
    ("make", "kept", "reason"),
    [
        (Shuffled, "first", "the rest computes something else"),
        (Baked, "first", "does not run"),
        (Normalised, "first", "the rest computes something else"),
        (Auxiliary, "first", "does not run in train mode"),
        (lambda: Reader(nn.LSTM), "first", "the input of a recurrent layer"),
        (lambda: Reader(nn.GRU), "first", "the input of a recurrent layer"),
        (Shared, "first", "share weights"),
    ],
    ids=["shuffle", "baked", "normalise", "train only", "lstm", "gru", "shared"],
)
def test_what_cannot_be_cut_is_left_whole_and_named(make: Callable[[], nn.Module], kept: str, reason: str) -> None:
    import re

    model = randomised(make())
    plan = plan_of(model)
    assert kept in plan.skipped
    assert re.search(reason, plan.skipped[kept])
    assert f"{kept}.weight" not in plan.cuts
    cut(model, plan.cuts)
    assert model.train()(images()).shape == (3, 10)
    if hasattr(model, "second") and make is not Shared:
        assert plan.layers["second"] == (6, 3)


def test_units_of_torchs_transformer_go_and_its_attention_is_named() -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 10)
    )
    randomised(model)
    x = images().squeeze(1)
    plan = plan_of(model, x=x)
    assert dict(plan.layers) == {"1.layers.0.linear1": (32, 16), "1.layers.1.linear1": (32, 16)}
    assert plan.skipped["0"].startswith("nn.MultiheadAttention (1.layers.")
    small = copy.deepcopy(model)
    cut(small, plan.cuts)
    expected = with_zeros(model, {f"1.layers.{i}.linear2.weight": 1 for i in (0, 1)}, plan.cuts)(x)
    torch.testing.assert_close(small(x), expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():  # the fused path of inference
        torch.testing.assert_close(small(x), expected, rtol=1e-4, atol=1e-5)


def test_two_calls_are_two_networks() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4))
            self.decoder = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 8))

    model = randomised(Pair())
    calls = [Call("encoder", (torch.randn(5, 8),), {}), Call("decoder", (torch.randn(5, 4),), {})]
    plan = plan_shrink(model, calls, ShrinkSettings())
    assert dict(plan.layers) == {"encoder.0": (12, 6), "decoder.0": (12, 6)}
    assert plan.skipped["encoder.2"] == "its channels are an output of the network or the input of a recurrent layer"


def test_few_samples_takes_what_has_the_length_of_the_batch() -> None:
    call = few_samples(Call("", (torch.ones(5, 2), torch.ones(3)), {"mask": torch.ones(5)}))
    assert [len(value) for value in (*call.args, call.kwargs["mask"])] == [2, 3, 2]

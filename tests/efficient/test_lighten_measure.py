"""Work by hand and by torch's counter, and that nothing is left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_speedkit.architecture import lighten_measure
from lightning_speedkit.architecture.lighten_measure import (
    call_model,
    count_flops,
    evaluating,
    float_outputs,
    paired_seconds,
    record_uses,
)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 3)

    def forward(self, images: Tensor, again: bool = True) -> dict[str, Tensor]:
        images = self.conv(images)
        if again:
            images = self.conv(images[:, :, ::2])
        return {"scores": self.head(images.mean((-1, -2)))}


def test_work_is_added_up_over_calls_and_agrees_with_torch() -> None:
    net = Twice()
    uses = record_uses(net, {"conv": net.conv, "head": net.head}, torch.zeros(2, 4, 8, 6))
    # 48 positions and then 24, two images, 4 outputs of 36 multiply-adds each
    assert uses["conv"].multiply_adds == 2 * (48 + 24) * 4 * 36
    assert uses["head"].multiply_adds == 2 * 3 * 4
    assert uses["conv"].shape == (2, 4, 8, 6)
    assert count_flops(net, torch.zeros(2, 4, 8, 6)) == 2 * sum(use.multiply_adds for use in uses.values())


def test_attention_in_a_fused_kernel_counts_too() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    products = 4 * 6 * 8 * 8 + 2 * 6 * 6 * 8 + 2 * 6 * 8 * 16
    assert count_flops(layer, torch.zeros(3, 6, 8)) == 2 * 3 * products


def test_the_input_for_timing_lies_as_the_real_one() -> None:
    net = Twice()
    images = torch.zeros(2, 4, 8, 6).to(memory_format=torch.channels_last)
    use = record_uses(net, {"conv": net.conv}, images)["conv"]
    assert use.input(torch.device("cpu")).stride() == images.stride()


@pytest.mark.parametrize(
    "example",
    [
        (torch.zeros(2, 4, 8, 6), False),
        {"images": torch.zeros(2, 4, 8, 6), "again": False},
        lambda net: net(torch.zeros(2, 4, 8, 6), again=False),
    ],
)
def test_every_form_of_an_example(example: Any) -> None:
    assert [t.shape for t in float_outputs(Twice(), example)] == [(2, 3)]


def test_modes_random_state_gradients_and_the_fused_path_are_as_before() -> None:
    net = nn.Sequential(nn.Dropout(), nn.Linear(2, 2))
    net[0].eval()
    state = torch.get_rng_state()

    def fail() -> None:
        with evaluating(net, fused_attention=False):
            assert not net[1].training
            assert not torch.is_grad_enabled()
            assert not torch.backends.mha.get_fastpath_enabled()
            torch.rand(3)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert [module.training for module in net.modules()] == [True, False, True]
    assert torch.is_grad_enabled()
    assert torch.backends.mha.get_fastpath_enabled()
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_that_writes_into_its_input_does_not_reach_the_example() -> None:
    given = torch.ones(2)
    call_model(nn.ReLU(inplace=True), -given)
    call_model(nn.Dropout(1.0, inplace=True), given)
    assert torch.equal(given, torch.ones(2))


def test_pairs_are_timed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    now, order = [0.0], ""

    def advance(name: str, seconds: float) -> None:
        nonlocal order
        order += name
        now[0] += seconds

    monkeypatch.setattr(lighten_measure.time, "perf_counter", lambda: now[0])
    device = torch.device("cpu")
    assert paired_seconds(lambda: advance("a", 2.0), lambda: advance("b", 0.5), device, 1.0) == (2.0, 0.5)
    assert order == "ab" + "abba" * 2 + "ab"

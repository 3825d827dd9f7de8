"""What stands for the cut layers, with one stage that has them all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_speedkit.parallel.pipeline_layers import InputReached, PipelinedLayers, Stage


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _made() -> tuple[nn.Sequential, PipelinedLayers]:
    whole = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    stages = {
        0: Stage([whole[0]], contextlib.nullcontext),
        1: Stage([whole[1], whole[2]], contextlib.nullcontext),
    }
    return whole, PipelinedLayers(whole, ["0", "1", "2"], stages, 2, dist.group.WORLD)


def test_without_gradients_it_is_the_whole_chain_under_its_names() -> None:
    whole, layers = _made()
    x = torch.randn(5, 3)
    with torch.no_grad():
        torch.testing.assert_close(layers(x), whole(x), rtol=0, atol=0)
    assert layers.state_dict().keys() == whole.state_dict().keys()
    assert layers.calls == 1


def test_in_a_step_it_gives_the_answer_or_says_what_came() -> None:
    _, layers = _made()
    x = torch.randn(5, 3)
    layers.catches_input = True
    with pytest.raises(InputReached) as reached:
        layers(x)
    assert reached.value.value is x
    layers.catches_input, layers.answer = False, torch.ones(5, 2)
    assert layers(x) is layers.answer


def test_outside_of_a_step_it_is_not_called_with_gradients() -> None:
    with pytest.raises(MisconfigurationException, match="called with gradients outside of training_step"):
        _made()[1](torch.randn(5, 3))


def test_a_stage_that_fails_is_named() -> None:
    with torch.no_grad(), pytest.raises(RuntimeError, match="Stage 0 failed: RuntimeError"):
        _made()[1](torch.randn(5, 7))

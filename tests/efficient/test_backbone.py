from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from lightning_speedkit.architecture import backbone, backbone_costs
from lightning_speedkit.architecture.backbone import pick_backbone
from lightning_speedkit.architecture.backbone_table import BackboneTable
from tests.efficient.tiny_backbones import Clock, Tiny, registered

SHAPE = (3, 4, 4)
QUICK, SLOW, WIDE, WRONG, FULL = (f"torchvision:{name}" for name in ("quick", "slow", "wide", "wrong", "full"))


class _Full(nn.Module):
    """Has enough memory for inference only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(48, 10)

    def forward(self, x: torch.Tensor) -> Any:
        if self.training:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return self.layer(x.flatten(1))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    for module in (backbone, backbone_costs):
        monkeypatch.setattr(module.time, "perf_counter", clock)
    with registered(
        quick=lambda n: Tiny("quick", clock, 0.001, n),
        slow=lambda n: Tiny("slow", clock, 0.004, n),
        wide=lambda n: Tiny("wide", clock, 0.002, n, wide=100),
        wrong=lambda n: Tiny("wrong", clock, 0.001, n + 1),
        full=lambda n: _Full(),
    ):
        yield clock


def pick(*names: str, budget: Any = None, seconds: float = 1.0, **more: Any) -> BackboneTable:
    return pick_backbone(SHAPE, 10, budget, list(names), device="cpu", batch_size=8, seconds=seconds, **more)


def test_times_and_counts_are_those_known_beforehand(clock: Clock) -> None:
    table = pick(SLOW, QUICK, WIDE)
    assert table.names == (QUICK, WIDE, SLOW)
    slow = table[SLOW]
    assert slow.parameters == 48 + 1 + 10 + 10
    assert slow.flops == 2 * (48 + 10)
    assert slow.latency_ms == pytest.approx(4)
    assert slow.batch_latency_ms == pytest.approx(32)
    assert slow.training_samples_per_second == pytest.approx(1 / 0.012)
    assert table[WIDE].latency_ms == pytest.approx(2)
    assert table.best.name == QUICK
    assert (table.threads, table.device, table.batch_size) == (torch.get_num_threads(), "cpu", 8)


def test_rounds_alternate_and_end_with_the_time(clock: Clock) -> None:
    table = pick(QUICK, SLOW, seconds=1e-9)  # the second is not reached, the first is timed in three rounds
    assert table[SLOW].error is not None
    assert "not reached" in table[SLOW].error
    assert table.rounds == 3
    clock.calls.clear()
    table = pick(QUICK, SLOW, seconds=4.0)
    timed = [name for name, count, training in clock.calls if count == 8 and training]
    turns = [name for number, name in enumerate(timed[4:]) if number % 2 == 0]  # without the look at the memory
    assert turns[:6] == ["quick", "slow", "slow", "quick", "quick", "slow"]
    assert table.rounds > 3
    # a round of both: 4 times one image, 2 batches, 2 steps of 3 times a batch
    assert clock.now < 2 * 4.0 + 5 * (4 + 16 + 48) * 0.005


def test_one_that_fails_does_not_end_the_search(clock: Clock) -> None:
    table = pick(WRONG, FULL, QUICK)
    assert table.best.name == QUICK
    assert table[WRONG].error == "ValueError: its output for one image is (1, 11), not logits of shape (1, 10)"
    assert table[FULL].error == "out of memory on cpu"
    assert table[FULL].parameters == 490
    assert set(table.names[1:]) == {WRONG, FULL}
    with pytest.raises(ValueError, match=r"No candidate could be measured.*wrong: .*11.*full: out of memory"):
        pick(WRONG, FULL)


def test_a_network_that_fails_only_when_timed_is_named_too(clock: Clock) -> None:
    class Late(Tiny):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(clock.calls) > 12:
                raise RuntimeError("late\nand more")
            return super().forward(x)

    with registered(late=lambda n: Late("late", clock, 0.001, n)):
        table = pick("torchvision:late", QUICK)
    assert table["torchvision:late"].error == "RuntimeError: late"
    assert table["torchvision:late"].latency_ms is None
    assert table.best.name == QUICK


def test_images_too_small_for_a_network_are_told() -> None:
    names = ["torchvision:convnext_tiny", "torchvision:mobilenet_v3_small"]
    with pytest.warns(UserWarning, match="No candidate meets the budget"):  # so that nothing is timed
        table = pick_backbone((1, 8, 8), 10, {"max_flops": 1}, names, device="cpu", batch_size=2, seconds=100.0)
    error = table["torchvision:convnext_tiny"].error
    assert error is not None
    assert "Kernel size can't be greater than actual input size" in error
    assert table["torchvision:mobilenet_v3_small"].flops


def test_more_parameters_than_allowed_are_not_timed(clock: Clock) -> None:
    table = pick(WIDE, QUICK, budget={"max_parameters": 1000})
    assert table.names == (QUICK, WIDE)
    wide = table[WIDE]
    assert (wide.parameters, wide.latency_ms, wide.training_memory_mib) == (5910, None, None)
    assert ("wide", 8, False) not in clock.calls
    assert table.note(wide) == "parameters 5\u202f910, max_parameters=1000"


def test_a_budget_that_nothing_meets_names_the_nearest(clock: Clock) -> None:
    with pytest.warns(
        UserWarning, match=r"No candidate meets the budget\. The nearest is torchvision:wide: .* 2\.00 ms"
    ):
        table = pick(SLOW, WIDE, budget={"max_latency_ms": 0.5, "min_training_samples_per_second": 100})
    assert table.names == (WIDE, SLOW)
    assert table[SLOW].excess(table.budget) == pytest.approx(
        {"max_latency_ms": 8.0, "min_training_samples_per_second": 1.2}
    )
    with pytest.raises(ValueError, match=r"No candidate meets the budget.*torchvision:wide"):
        _ = table.best


def test_the_caller_s_state_is_left(clock: Clock) -> None:
    before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state()
    threads, default = torch.get_num_threads(), torch.get_default_dtype()
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        table = pick(QUICK)
        assert torch.is_inference_mode_enabled()
        assert not torch.is_grad_enabled()
    assert table.best.training_samples_per_second is not None
    assert random.getstate() == before[0]
    assert numpy.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert (torch.get_num_threads(), torch.get_default_dtype()) == (threads, default)


def test_it_measures_under_the_autocast_that_is_on(clock: Clock) -> None:
    made: list[Tiny] = []

    def make(classes: int) -> nn.Module:
        made.append(Tiny("cast", clock, 0.001, classes))
        return made[0]

    with registered(cast=make), torch.autocast("cpu", torch.bfloat16):
        pick("torchvision:cast")
    assert made[0].dtype == torch.bfloat16


def test_nothing_is_shown_where_there_is_no_terminal(clock: Clock, capfd: pytest.CaptureFixture[str]) -> None:
    pick(QUICK)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 must be a whole number from 1"),
        ({"seconds": float("inf")}, "seconds=inf must be a finite number above 0"),
        ({"objective": "latencyy"}, "Did you mean 'latency'"),
        ({"budget": {"max_latency": 3}}, "'max_latency' is no limit. Did you mean 'max_latency_ms'"),
        ({"task_shape": (64, 64)}, r"task_shape=\(64, 64\) must be channels, height and width"),
        ({"num_classes": 0}, "num_classes=0 must be a whole number from 1"),
        ({"device": "tpu"}, "accelerator='tpu' is unknown"),
        ({"candidates": ["torchvision:resnet19"]}, "no classifier 'resnet19'. Did you mean 'torchvision:resnet1"),
    ],
)
def test_wrong_arguments_are_told(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pick_backbone(**arguments)

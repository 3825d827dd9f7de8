"""Calls of a network are recorded, changed and repeated as they were made."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_speedkit.compress.calls import (
    Call,
    batch_size,
    call_with,
    first_sample,
    inside_metrics,
    record_calls,
    replay,
    used_modules,
)


class TestCalls:
    def test_an_exception_leaves_no_hook_and_no_depth(self) -> None:
        net = nn.Sequential(nn.Linear(2, 2))
        with record_calls(net) as calls:
            with pytest.raises(RuntimeError):
                net(torch.ones(1, 3))
            net(torch.ones(5, 2))
        assert [(c.name, tuple(c.args[0].shape)) for c in calls] == [("", (1, 3)), ("", (5, 2))]
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())

    def test_networks_inside_metrics_are_not_the_network(self) -> None:
        class Distance(Metric):
            def __init__(self) -> None:
                super().__init__()
                self.net = nn.Linear(2, 2)
                self.add_state("total", torch.tensor(0.0))

            def update(self, x: Tensor) -> None:
                self.total += self.net(x).sum()

            def compute(self) -> Tensor:
                return self.total

        root = nn.ModuleDict({"net": nn.Linear(2, 2), "metric": Distance()})
        assert inside_metrics(root) == {"metric", "metric.net"}
        with record_calls(root) as calls:
            root["metric"].update(root["net"](torch.ones(1, 2)))
        assert [call.name for call in calls] == ["net"]

    def test_first_sample_cuts_what_has_the_length_of_the_batch(self) -> None:
        call = Call(
            "", (torch.zeros(4, 3), [torch.zeros(4)]), {"table": torch.zeros(7, 3), "scalar": torch.tensor(1.0)}
        )
        one = first_sample(call)
        assert [tuple(t.shape) for t in (one.args[0], one.args[1][0], *one.kwargs.values())] == [
            (1, 3),
            (1,),
            (7, 3),
            (),
        ]

    def test_replay_draws_the_same_numbers_and_leaves_the_generator(self) -> None:
        before = torch.get_rng_state()
        call = [Call("", (torch.ones(100),), {})]
        dropout = nn.Dropout(0.5)
        torch.testing.assert_close(replay(dropout, call), replay(dropout, call), rtol=0, atol=0)
        torch.testing.assert_close(torch.get_rng_state(), before, rtol=0, atol=0)


class _Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        self.decoder = nn.Linear(3, 2)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.decoder(self.encoder(x)) * scale


def test_outermost_calls_are_recorded_with_copies_of_their_arguments() -> None:
    net, x = _Nested(), torch.ones(4, 2)
    with record_calls(net) as calls:
        net(x, scale=2.0)
        net.encoder(x)
        nn.functional.mse_loss(x, x)
        x.zero_()
    assert [(call.name, dict(call.kwargs)) for call in calls] == [("", {"scale": 2.0}), ("encoder", {})]
    assert all(torch.equal(call.args[0], torch.ones(4, 2)) for call in calls)
    with record_calls(net, include_root=False) as calls:
        net(x)
    assert [call.name for call in calls] == ["encoder", "decoder"]


def test_used_modules_are_those_that_run_with_the_arguments_of_their_first_call() -> None:
    net = _Nested()
    batches = [torch.full((4, 2), float(value)) for value in (1, 2)]
    used = used_modules(net, [Call("", (x,), {}) for x in batches])
    assert list(used) == ["", "encoder", "encoder.0", "encoder.1", "decoder"]
    assert torch.equal(used["encoder"].args[0], batches[0])
    assert used["encoder.1"].args == ()  # it has no parameters
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


@dataclasses.dataclass(frozen=True)
class _Output:
    logits: Tensor
    extra: dict[str, Any]


def test_replay_finds_the_floating_tensors_of_any_output() -> None:
    class Answers(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return [_Output(x + 1, {"more": (x + 2, torch.tensor(1), "text"), "none": None}), x + 3]

    found = replay(Answers(), [Call("", (torch.zeros(2),), {}), Call("", (torch.ones(2),), {})])
    assert [float(tensor[0]) for tensor in found] == [1, 2, 3, 2, 3, 4]


def test_a_call_gets_copies_also_inside_a_frozen_argument() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor, options: _Output) -> Tensor:
            return x.add_(len(options.extra))

    x = torch.zeros(3)
    call = Call("", (x, _Output(torch.ones(1), {"a": 1})), {})
    assert torch.equal(call_with(Writes(), call), torch.ones(3))
    assert torch.equal(call_with(Writes(), call), torch.ones(3))
    assert torch.equal(x, torch.zeros(3))
    one = first_sample(call)
    assert (one.args[0].shape, one.args[1].extra) == ((1,), {"a": 1})


@pytest.mark.parametrize(
    ("args", "kwargs", "size"),
    [
        ((torch.zeros(4, 3),), {}, 4),
        ((torch.tensor(1.0),), {"x": [torch.zeros(5)]}, 5),
        ((), {"flag": True}, 1),
        (({"ids": torch.zeros(3, dtype=torch.long)},), {}, 3),
    ],
)
def test_batch_size_is_that_of_the_first_tensor_with_dimensions(args: Any, kwargs: Any, size: int) -> None:
    assert batch_size(Call("", args, kwargs)) == size

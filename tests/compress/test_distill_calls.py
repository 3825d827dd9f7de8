"""Which calls of a network are seen, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_speedkit.compress.distill_calls import NetworkCall, WatchedCalls, check_calls


class _Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        self.head = nn.Linear(3, 1)
        self.loss = nn.MSELoss()

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.head(self.body(x)) * scale


def test_only_the_outermost_calls_inside_the_block_are_seen() -> None:
    root, x = _Root(), torch.ones(4, 2)
    watched = WatchedCalls(root)
    root(x)
    with watched.watching() as calls:
        output = root(x, scale=2.0)
        root.head(root.body(x))
        root.loss(output, output)  # has no parameters
    root(x)
    assert [call.name for call in calls] == ["", "body", "head"]
    assert (calls[0].args, calls[0].kwargs) == ((x,), {"scale": 2.0})
    assert calls[0].output is output
    watched.remove()
    modules = list(root.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)


def test_a_named_network_alone_and_features_of_each_call() -> None:
    root = _Root()
    watched = WatchedCalls(root, "body", features=["body.0"])
    with watched.watching() as calls:
        root(torch.ones(1, 2))
        root(torch.zeros(1, 2))
    assert [call.name for call in calls] == ["body", "body"]
    for call, x in zip(calls, (torch.ones(1, 2), torch.zeros(1, 2)), strict=True):
        by_hand = x @ root.body[0].weight.T + root.body[0].bias  # type: ignore[operator]
        torch.testing.assert_close(call.features, {"body.0": by_hand})
    watched.remove()


def test_a_call_that_failed_does_not_hide_the_next_one() -> None:
    root = _Root()
    watched = WatchedCalls(root)
    with watched.watching() as calls:
        with pytest.raises(RuntimeError):
            root(torch.ones(1, 5))
        root(torch.ones(1, 2))
    assert calls[-1].name == ""
    assert calls[-1].output.shape == (1, 1)


def _call(name: str, *args: Any) -> NetworkCall:
    return NetworkCall(name, args, {}, None)


def test_calls_that_a_teacher_cannot_stand_beside_are_refused() -> None:
    x = torch.ones(1)
    versions = {id(x): x._version}
    check_calls([_call("net", x), _call("net", x * 1)], versions, "Module")
    with pytest.raises(MisconfigurationException, match=r"Module\.training_step called neither"):
        check_calls([], versions, "Module")
    with pytest.raises(MisconfigurationException, match=r"several networks \(head, the module itself\)"):
        check_calls([_call("head", x), _call("", x)], versions, "Module")
    x.mul_(2)
    with pytest.raises(MisconfigurationException, match="writes into its input"):
        check_calls([_call("net", {"x": [x]})], versions, "Module")


def test_calls_without_gradients_do_not_count() -> None:
    net = nn.Linear(2, 1)
    watched = WatchedCalls(net, "", [])
    with watched.watching() as calls:
        with torch.no_grad():
            net(torch.zeros(1, 2))
        net(torch.ones(3, 2))
    watched.remove()
    assert [len(call.output) for call in calls] == [3]

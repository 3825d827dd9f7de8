"""What torch adds to shard a module is taken back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_speedkit.parallel.plan_wrap import (
    ShardedRoot,
    Undo,
    checkpoint_forward,
    is_sharded,
    reshard,
    shard,
    whole_value,
)
from tests.parallel.plan_models import Block
from tests.two_ranks import on_two_ranks


def _net() -> nn.Sequential:
    torch.manual_seed(2)
    net = nn.Sequential(Block(), nn.LSTM(6, 3, batch_first=True))
    net.register_forward_hook(_keep)
    return net


def _keep(module: nn.Module, arguments: Any, output: Any) -> Any:
    return output


def _there_and_back() -> dict[str, Any]:
    dist.init_process_group("gloo")
    net, x = _net(), torch.ones(2, 3, 6)
    before = list(net.parameters())
    expected = net(x)[0].detach()
    mesh = init_device_mesh("cpu", (2,))
    found: dict[str, Any] = {}
    for known in (True, False):
        undo = Undo(net)
        root = shard(net, ["0"], mesh, None, offload=False)
        undo.release()
        found["held"] = sum(p.numel() for p in before)
        found["sharded"] = is_sharded(net)
        found["output"] = torch.equal(root(x)[0], expected)
        reshard(root)
        found["whole"] = all(
            whole_value(p).shape == b.shape for p, b in zip(net.parameters(), _net().parameters(), strict=True)
        )
        undo.take_back(known)
        found[f"back {known}"] = (
            [a is b for a, b in zip(net.parameters(), before, strict=True)],
            [type(m).__name__ for m in net.modules()],
            torch.equal(net(x)[0], expected),
            all(bool(p.isnan().all()) for p in before),
            len(net._forward_hooks),
        )
    dist.destroy_process_group()
    return found


def test_sharded_and_back_on_two_ranks() -> None:
    names = [type(m).__name__ for m in _net().modules()]
    for found in on_two_ranks(_there_and_back, timeout=60.0):
        assert found["held"] == 0
        assert found["sharded"]
        assert found["output"]
        assert found["whole"]
        same, kinds, equal, lost, hooks = found["back True"]
        assert all(same)
        assert (kinds, equal, lost, hooks) == (names, True, False, 1)
        same, kinds, equal, lost, hooks = found["back False"]
        assert all(same)
        assert (kinds, equal, lost, hooks) == (names, False, True, 1)


def test_a_root_calls_forward_without_the_hooks_of_the_module() -> None:
    layer = nn.Linear(2, 2)
    called: list[Any] = []
    layer.register_forward_pre_hook(lambda module, arguments: called.append(arguments))
    x = torch.ones(1, 2)
    assert torch.equal(ShardedRoot(layer)(x), layer.forward(x))
    assert called == []


class _Counting(Block):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        _Counting.calls += 1
        return super().forward(nn.functional.dropout(x, 0.5, self.training))


def test_activations_are_computed_again_with_the_same_dropout() -> None:
    x = torch.ones(4, 6)
    grads, names = [], []
    for again in (False, True):
        torch.manual_seed(1)
        block = _Counting()
        if again:
            checkpoint_forward(block)
        _Counting.calls = 0
        block(x).sum().backward()
        assert _Counting.calls == 1 + again
        grads.append([p.grad for p in block.parameters()])
        names.append((type(block).__name__, list(block.state_dict()), isinstance(block, Block)))
        _Counting.calls = 0
        block.eval()(x).sum().backward()
        assert _Counting.calls == 1
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)
    assert names[0] == names[1]

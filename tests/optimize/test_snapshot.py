"""Going back to a snapshot and on again gives what the run gave the first time, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from torch import Tensor, nn

from lightning_speedkit.optimize.schedule_free import ScheduleFreeAdamW
from lightning_speedkit.optimize.snapshot import RunningStatistics, Snapshot


def _net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def _train(net: nn.Module, optimizer: Any, batches: Tensor) -> None:
    for batch in batches:
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("on_disk", [False, True])
def test_the_way_back_is_exact(name: str, before: int, on_disk: bool, tmp_path: Path) -> None:
    batches = torch.randn(9, 5, 3, generator=torch.Generator().manual_seed(2))
    net = _net()
    optimizer = OPTIMIZERS[name](net.parameters())
    references = list(net.parameters())
    _train(net, optimizer, batches[:before])
    snapshot = Snapshot.take(net, optimizer)
    if on_disk:
        snapshot.save(tmp_path / "a.pt")
        snapshot = Snapshot.load(tmp_path / "a.pt")
    _train(net, optimizer, batches[2:6] * 100)
    snapshot.restore(net, optimizer)
    _train(net, optimizer, batches[6:])

    plain = _net()
    optimizer = OPTIMIZERS[name](plain.parameters())
    _train(plain, optimizer, batches[:before])
    _train(plain, optimizer, batches[6:])
    torch.testing.assert_close(net.state_dict(), plain.state_dict(), rtol=0, atol=0)
    assert all(a is b for a, b in zip(net.parameters(), references, strict=True))
    assert [p.name for p in tmp_path.iterdir()] == (["a.pt"] if on_disk else [])


def test_a_learning_rate_is_not_taken_back() -> None:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    snapshot = Snapshot.take(net, optimizer)
    optimizer.param_groups[0]["lr"] = 0.01
    snapshot.restore(net, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.01


def test_what_an_optimizer_counts_in_its_groups_is_taken_back() -> None:
    batches = torch.randn(9, 5, 3, generator=torch.Generator().manual_seed(2))
    net = _net()
    optimizer = ScheduleFreeAdamW(net.parameters(), lr=0.1)
    _train(net, optimizer, batches[:3])
    snapshot = Snapshot.take(net, optimizer)
    _train(net, optimizer, batches[3:6])
    optimizer.param_groups[0]["lr"] = 0.05
    snapshot.restore(net, optimizer)
    _train(net, optimizer, batches[6:])

    plain = _net()
    optimizer = ScheduleFreeAdamW(plain.parameters(), lr=0.1)
    _train(plain, optimizer, batches[:3])
    optimizer.param_groups[0]["lr"] = 0.05
    _train(plain, optimizer, batches[6:])
    torch.testing.assert_close(net.state_dict(), plain.state_dict(), rtol=0, atol=0)


def test_parameters_that_the_optimizer_got_since_then_lose_their_state() -> None:
    net = _net()
    optimizer = torch.optim.AdamW(net[0].parameters(), lr=0.1)
    batches = torch.randn(4, 5, 3)
    _train(net, optimizer, batches)
    snapshot, steps = Snapshot.take(net, optimizer), optimizer.state[net[0].weight]["step"].item()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    optimizer.add_param_group({"params": list(net[2].parameters())})
    _train(net, optimizer, batches)
    snapshot.restore(net, optimizer)
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    assert optimizer.state[net[0].weight]["step"].item() == steps == 4
    assert net[2].weight not in optimizer.state


def test_a_module_of_other_parameters_is_refused_and_left_as_it_is() -> None:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    snapshot = Snapshot.take(net, optimizer)
    torch.nn.utils.prune.l1_unstructured(net[0], "weight", 1)
    net[2] = nn.Linear(4, 2)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    words = (
        r"are others \(new: 0.weight_mask, 0.weight_orig; gone: 0.weight; of another shape: 2.bias, 2.weight\)\. Add,"
    )
    with pytest.raises(ValueError, match=words):
        snapshot.restore(net, optimizer)
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)


def test_memory_is_used_again_and_later_steps_do_not_reach_it() -> None:
    net = _net()
    optimizer = OPTIMIZERS["adamw"](net.parameters())
    batches = torch.randn(4, 5, 3)
    _train(net, optimizer, batches)
    first = Snapshot.take(net, optimizer)
    memory = {name: tensor.data_ptr() for name, tensor in first.tensors.items()}
    _train(net, optimizer, batches)
    second = Snapshot.take(net, optimizer, into=first)
    assert {name: tensor.data_ptr() for name, tensor in second.tensors.items()} == memory
    expected = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    _train(net, optimizer, batches)
    second.restore(net, optimizer)
    torch.testing.assert_close(net.state_dict(), expected, rtol=0, atol=0)


def test_running_statistics_come_back_also_after_more_was_kept() -> None:
    net = nn.Sequential(nn.BatchNorm1d(2), nn.InstanceNorm1d(2, track_running_stats=True), nn.LayerNorm(2))
    statistics = RunningStatistics(net[0])
    net[0](torch.randn(4, 2))
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    statistics.keep()
    net[0](torch.full((4, 2), float("nan")))
    kept = statistics.hand_over()
    statistics.keep()
    net[0](torch.randn(4, 2))
    statistics.restore(kept)
    torch.testing.assert_close(dict(net.named_buffers()), before, rtol=0, atol=0)
    assert len(RunningStatistics(net)._buffers) == 6
    nothing = RunningStatistics(net[2])
    nothing.keep()
    nothing.restore()

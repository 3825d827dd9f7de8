"""Batch normalisation over two ranks against one layer on the whole batch, also of ranks with different numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_speedkit.parallel.host_batch_norm import HostSyncBatchNorm, sync_as_before, sync_on_host
from tests.two_ranks import on_two_ranks

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "cumulative": {"momentum": None},
    "without weights": {"affine": False},
    "without statistics": {"track_running_stats": False},
}
SPLIT = 3  # rows of rank 0; rank 1 has the other five


def _batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [10 + 3 * torch.randn(8, 3, 5, generator=generator, dtype=torch.float64) for _ in range(3)]


def _norm(case: str, kind: type[nn.Module]) -> nn.Module:
    layer = kind(3, **CASES[case]).double()
    if CASES[case].get("affine", True):
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([1.0, 2.0, 3.0]))  # type: ignore[operator]
            layer.bias.copy_(torch.tensor([0.5, -1.0, 0.0]))  # type: ignore[operator]
    return layer


def _train(layer: nn.Module, rows: slice) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for number, batch in enumerate(_batches()):
        mine = batch[rows].clone().requires_grad_()
        result = layer(mine)
        (result * torch.arange(8.0)[rows].view(-1, 1, 1)).square().sum().backward()
        assert mine.grad is not None
        found[f"result {number}"], found[f"gradient {number}"] = result.detach(), mine.grad
    layer.eval()
    found["eval"] = layer(_batches()[0][rows]).detach()
    found |= {name: value.detach() for name, value in layer.state_dict().items()}
    return found | {f"gradient of {name}": p.grad for name, p in layer.named_parameters() if p.grad is not None}


def _rank(rank: int | None = None) -> dict[str, dict[str, Tensor]]:
    torch.distributed.init_process_group("gloo")
    rows = slice(SPLIT) if torch.distributed.get_rank() == 0 else slice(SPLIT, None)
    found = {case: _train(_norm(case, HostSyncBatchNorm), rows) for case in CASES}
    torch.distributed.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, dict[str, Tensor]]]:
    return on_two_ranks(_rank, timeout=60)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one_layer_on_the_whole_batch(ranks: Any, case: str) -> None:
    expected = _train(_norm(case, nn.BatchNorm1d), slice(None))
    for name, value in expected.items():
        first, second = (rank[case][name] for rank in ranks)
        if name.startswith(("result", "gradient ")) and "of" not in name:
            found = torch.cat([first, second])
        elif name == "eval":
            if case == "without statistics":
                continue  # in eval each rank has the statistics of its own batch, as in torch
            found = torch.cat([first, second])
        else:
            found = first + second if name.startswith("gradient of") else first
        torch.testing.assert_close(found, value, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


def test_it_keeps_dtype_and_can_be_copied() -> None:
    layer = HostSyncBatchNorm(3)
    assert layer(torch.randn(4, 3).bfloat16()).dtype == torch.bfloat16
    assert type(copy.deepcopy(layer)) is HostSyncBatchNorm


def test_one_value_per_channel_is_refused() -> None:
    with pytest.raises(ValueError, match="more than one value per channel"):
        HostSyncBatchNorm(3)(torch.randn(1, 3))


def test_only_layers_that_synchronise_are_changed() -> None:
    model = nn.Sequential(nn.SyncBatchNorm(2), nn.BatchNorm1d(2), HostSyncBatchNorm(2), nn.SyncBatchNorm(2).to("meta"))
    assert sync_on_host(model) == 1
    assert [type(layer) for layer in model][:3] == [HostSyncBatchNorm, nn.BatchNorm1d, HostSyncBatchNorm]
    sync_as_before(model)
    assert [type(layer) for layer in model][:2] == [nn.SyncBatchNorm, nn.BatchNorm1d]

"""Masks, against weights and numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_speedkit.compress.prune_masks import PruningMasks, is_two_of_four


def _weights(*rows: list[float]) -> dict[str, Tensor]:
    return {"abc"[i]: nn.Parameter(torch.tensor([row])) for i, row in enumerate(rows)}


def _live(masks: PruningMasks) -> dict[str, list[int]]:
    return {name: [int(not gone) for gone in marked.flatten()] for name, marked in masks.pruned.items()}


def test_all_weights_compete_or_each_layer_by_itself() -> None:
    rows = [0.1, -0.2, 0.3, 0.4], [-5.0, 6.0, 7.0, 0.25]
    masks = PruningMasks(_weights(*rows))
    masks.prune_to(0.5)
    assert _live(masks) == {"a": [0, 0, 0, 1], "b": [1, 1, 1, 0]}
    masks = PruningMasks(_weights(*rows), scope="layer")
    masks.prune_to(0.5)
    assert _live(masks) == {"a": [0, 0, 1, 1], "b": [0, 1, 1, 0]}
    assert masks.counts() == {"a": 2, "b": 2}
    assert masks.sparsity() == 0.5


def test_what_is_pruned_stays_so_whatever_it_scores() -> None:
    masks = PruningMasks(_weights([1.0, 2.0, 3.0, 4.0]))
    masks.prune_to(0.25)
    masks.prune_to(0.5, {"a": torch.tensor([[9.0, 9.0, 9.0, -1.0]])})
    assert _live(masks) == {"a": [0, 1, 1, 0]}
    masks.prune_to(0.25)
    assert masks.count() == 2


@pytest.mark.parametrize("sparsity", [0.0, 0.1, 1 / 3, 0.5, 0.9, 0.999])
def test_count_is_exact(sparsity: float) -> None:
    torch.manual_seed(0)
    weights = {"a": torch.randn(11, 13), "b": torch.randn(7, 3, 3).round(decimals=1)}
    masks = PruningMasks(weights)
    masks.prune_to(sparsity)
    masks.apply()
    assert sum(int((w == 0).sum()) for w in weights.values()) >= masks.count() == round(sparsity * 206)
    assert masks.total() == 206


def test_pattern_grows_to_two_of_four() -> None:
    weights = {"a": nn.Parameter(torch.tensor([[1.0, 2.0, 3.0, 4.0, 50.0, 60.0, 70.0, 80.0]]))}
    masks = PruningMasks(weights, pattern="2:4")
    masks.prune_to(0.3)  # 2.4 of 8
    assert _live(masks) == {"a": [0, 0, 1, 1, 1, 1, 1, 1]}
    assert not is_two_of_four(weights["a"])
    masks.prune_to(0.5)  # the next smallest, 3 and 4, are not free to go
    masks.apply()
    assert weights["a"].tolist() == [[0, 0, 3, 4, 0, 0, 70, 80]]
    assert is_two_of_four(weights["a"])
    assert not is_two_of_four(torch.zeros(2, 6))
    assert not is_two_of_four(torch.zeros(8))


def test_two_of_four_is_that_of_torchao() -> None:
    sparsity = pytest.importorskip("torchao.sparsity")
    torch.manual_seed(0)
    ours, theirs = nn.Linear(16, 8, bias=False), nn.Sequential(nn.Linear(16, 8, bias=False))
    theirs[0].weight.data = ours.weight.detach().clone()
    masks = PruningMasks({"weight": ours.weight}, pattern="2:4")
    masks.prune_to(0.5)
    masks.apply()
    sparsity.apply_fake_sparsity(theirs)
    torch.testing.assert_close(ours.weight, theirs[0].weight, rtol=0, atol=0)


def test_regrowth_exchanges_the_smallest_for_the_largest_gradients() -> None:
    masks = PruningMasks(_weights([4.0, 3.0, 2.0, 1.0, 0.1, 0.2, 0.3, 0.4]))
    masks.prune_to(0.5)
    assert _live(masks) == {"a": [1, 1, 1, 1, 0, 0, 0, 0]}
    gradients = {"a": torch.tensor([[9.0, 9.0, 9.0, 9.0, 0.5, -7.0, float("nan"), 0.6]])}
    masks.regrow(0.49, gradients)  # 1.96 of 4, rounded down
    assert _live(masks) == {"a": [1, 1, 1, 0, 0, 1, 0, 0]}
    masks.regrow(0.0, gradients)
    masks.regrow(1.0, {})  # no more come back than were pruned; of equal gradients the first
    assert _live(masks) == {"a": [0, 0, 0, 1, 1, 0, 1, 1]}
    assert masks.count() == 4


def test_zeros_are_taken_but_not_layers_that_begin_at_zero() -> None:
    masks = PruningMasks(_weights([0.0, 1.0, 0.0, 2.0], [0.0, 0.0]))
    masks.take_zeros()
    assert masks.counts() == {"a": 2, "b": 0}
    masks = PruningMasks(_weights([0.0, 0.0, 0.0, 2.0]), pattern="2:4")
    masks.take_zeros()
    assert masks.count() == 2


def test_more_zeros_than_the_target_are_refused() -> None:
    masks = PruningMasks(_weights([0.0, 0.0, 0.0, 2.0]))
    masks.take_zeros()
    masks.refuse_below(0.75)
    with pytest.raises(ValueError, match=r"The model has a sparsity of 0.750 already, and 0.5 is below it"):
        masks.refuse_below(0.5)
    masks = PruningMasks({"a": torch.ones(2), "b": torch.tensor([0.0, 1.0])}, scope="layer")
    masks.take_zeros()
    with pytest.raises(ValueError, match=r"'b' has a sparsity of 0.500 already"):
        masks.refuse_below(0.2)


def test_a_zero_by_chance_is_no_reason_to_refuse() -> None:
    weight = torch.arange(1, 1001).float().view(10, 100)
    weight.view(-1)[:505] = 0
    masks = PruningMasks({"a": weight})
    masks.take_zeros()
    masks.refuse_below(0.5)
    masks.prune_to(0.5)
    assert masks.count() == 500


def test_gradients_and_optimizer_state_of_pruned_weights_are_zero() -> None:
    weights = _weights([1.0, 2.0, 3.0, 4.0])
    optimizer = torch.optim.AdamW(weights.values(), lr=0.1)
    weights["a"].grad = torch.ones(1, 4)
    optimizer.step()
    masks = PruningMasks(weights)
    masks.prune_to(0.5)
    masks.apply_to_gradients()
    masks.apply_to_state(optimizer)
    state = optimizer.state[weights["a"]]  # type: ignore[index]
    assert weights["a"].grad.tolist() == [[0, 0, 1, 1]]  # type: ignore[union-attr]
    torch.testing.assert_close(state["exp_avg"], torch.tensor([[0, 0, 0.1, 0.1]]))
    assert state["exp_avg_sq"].count_nonzero() == 2
    assert state["step"] == 1


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_held_weights_stay_zero(kind: Any) -> None:
    layer = nn.Linear(6, 4)
    optimizer = kind(layer.parameters(), lr=0.1, weight_decay=0.1)
    masks = PruningMasks({"weight": layer.weight})
    masks.prune_to(0.5)
    handle = masks.hold(optimizer)
    before = layer.weight.detach().clone()
    for _ in range(3):
        layer(torch.ones(2, 6)).square().mean().backward()
        optimizer.step()
        assert torch.equal(layer.weight == 0, masks.pruned["weight"])
    assert (layer.weight != before)[~masks.pruned["weight"]].all()
    handle.remove()
    optimizer.step()
    assert not torch.equal(layer.weight == 0, masks.pruned["weight"])


def test_a_bit_for_each_weight_goes_into_a_checkpoint() -> None:
    torch.manual_seed(0)
    weights = {"a": torch.randn(3, 7), "b": torch.randn(5)}
    masks, other = PruningMasks(weights), PruningMasks(weights)
    masks.prune_to(0.4)
    packed = masks.packed()
    assert {name: bits.numel() for name, bits in packed.items()} == {"a": 3, "b": 1}
    other.unpack(packed)
    assert _live(other) == _live(masks)
    with pytest.raises(ValueError, match="The masks are of other weights: a, b"):
        PruningMasks({"b": torch.randn(9)}).unpack(packed)

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_speedkit.compress.shrink_sizes import cut, cut_tensor, named_tensors, set_sizes, set_tensors


@pytest.mark.parametrize(
    ("layer", "cuts", "numbers"),
    [
        (
            nn.Conv2d(6, 8, 3),
            {"weight": {0: [1, 2], 1: [0, 3, 5]}, "bias": {0: [1, 2]}},
            ("in_channels", 3, "out_channels", 2),
        ),
        (nn.Conv1d(6, 6, 3, groups=6), {"weight": {0: [4, 5]}, "bias": {0: [4, 5]}}, ("in_channels", 2, "groups", 2)),
        (nn.Conv2d(6, 9, 1, groups=3), {"weight": {1: [1]}}, ("in_channels", 3, "groups", 3)),
        (
            nn.ConvTranspose2d(6, 4, 2),
            {"weight": {0: [1, 2], 1: [0]}, "bias": {0: [0]}},
            ("in_channels", 2, "out_channels", 1),
        ),
        (nn.Linear(4, 6), {"weight": {1: [0]}}, ("in_features", 1, "out_features", 6)),
        (
            nn.BatchNorm2d(4),
            {name: {0: [1, 3]} for name in ("weight", "bias", "running_mean", "running_var")},
            ("num_features", 2, "eps", 1e-5),
        ),
        (nn.LayerNorm(5), {"weight": {0: [0, 4]}, "bias": {0: [0, 4]}}, ("normalized_shape", (2,), "eps", 1e-5)),
        (nn.RMSNorm(5), {"weight": {0: [0, 4]}}, ("normalized_shape", (2,), "elementwise_affine", True)),
        (nn.GroupNorm(2, 4), {"weight": {0: [0, 2]}, "bias": {0: [0, 2]}}, ("num_channels", 2, "num_groups", 2)),
        (nn.Embedding(7, 4), {"weight": {1: [0, 2]}}, ("embedding_dim", 2, "num_embeddings", 7)),
        (nn.PReLU(4), {"weight": {0: [0, 2, 3]}}, ("num_parameters", 3, "training", True)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_numbers_of_a_layer_follow_its_weights(layer: nn.Module, cuts: dict, numbers: tuple) -> None:
    values = {name: tensor.detach().clone() for name, tensor in named_tensors(layer).items()}
    cut(layer, cuts)
    for name, dims in cuts.items():
        expected = values[name]
        for dim, indices in dims.items():
            expected = torch.stack([expected.select(dim, i) for i in indices], dim)
        torch.testing.assert_close(named_tensors(layer)[name].detach(), expected, rtol=0, atol=0)
    assert (getattr(layer, numbers[0]), getattr(layer, numbers[2])) == (numbers[1], numbers[3])


def test_gradients_flow_after_a_cut_while_an_old_graph_is_alive() -> None:
    layer = nn.Linear(4, 6)
    held = layer(torch.ones(1, 4)).sum()  # keeps what adds to the gradient of the old size
    layer.bias.requires_grad_(False)
    cut(layer, {"weight": {0: [0, 1], 1: [2, 3]}, "bias": {0: [0, 1]}})
    layer(torch.ones(1, 2)).sum().backward()
    assert torch.equal(layer.weight.grad, torch.ones(2, 2))
    assert layer.bias.grad is None
    assert held.grad_fn is not None


def test_shared_weights_stay_shared_and_memory_formats_stay() -> None:
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.weight = one.weight
    net = nn.Sequential(one, other)
    cut(net, {"0.weight": {0: [1, 2]}, "0.bias": {0: [1, 2]}, "1.bias": {0: [1, 2]}})
    assert one.weight is other.weight
    assert other.out_features == 2 or one.out_features == 2
    conv = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
    kept = cut_tensor(conv.weight, {0: [0, 1, 2]})
    assert kept.is_contiguous(memory_format=torch.channels_last)
    assert not cut_tensor(nn.Conv2d(4, 4, 3).weight, {0: [0]}).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("optimizer", "keys"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), ["momentum_buffer"]),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]),
        (lambda p: torch.optim.Adafactor(p), ["row_var", "col_var"]),
        (lambda p: torch.optim.RMSprop(p), ["square_avg"]),
    ],
    ids=["sgd", "adamw", "adafactor", "rmsprop"],
)
def test_state_of_optimizers_is_cut_with_the_same_indices(optimizer, keys: list[str]) -> None:
    layer = nn.Linear(4, 6, bias=False)
    made = optimizer(layer.parameters())
    layer(torch.randn(3, 4)).square().sum().backward()
    made.step()
    old = {key: made.state[layer.weight][key].clone() for key in keys}
    cut(layer, {"weight": {0: [1, 4, 5], 1: [0, 2]}}, [made])
    for key in keys:
        rows = old[key][[1, 4, 5]] if old[key].shape[0] == 6 else old[key]
        expected = rows[:, [0, 2]] if old[key].shape[1] == 4 else rows
        torch.testing.assert_close(made.state[layer.weight][key], expected, rtol=0, atol=0)
    made.zero_grad()
    layer(torch.randn(3, 2)).square().sum().backward()
    made.step()


def test_state_in_another_shape_starts_anew_with_a_warning() -> None:
    layer = nn.Linear(4, 6, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    optimizer.state[layer.weight] = {"blocks": torch.zeros(3, 8)}
    with pytest.warns(UserWarning, match="the state of 1 parameters starts anew"):
        cut(layer, {"weight": {0: [0]}}, [optimizer])
    assert layer.weight not in optimizer.state


def test_sizes_can_grow_and_values_be_put() -> None:
    layer = nn.Conv2d(2, 3, 1)
    weight = layer.weight
    set_sizes(layer, {"weight": [5, 4, 1, 1], "bias": [5]})
    assert (layer.out_channels, layer.in_channels) == (5, 4)
    assert layer(torch.ones(1, 4, 2, 2)).shape == (1, 5, 2, 2)
    set_tensors(layer, {"bias": torch.full((5,), 2.0)})
    assert torch.equal(layer(torch.ones(1, 4, 2, 2)), torch.full((1, 5, 2, 2), 2.0))
    assert layer.weight is weight

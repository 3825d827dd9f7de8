"""A network is told from another by the names and shapes of its weights."""

from __future__ import annotations

import pytest
from torch import nn

from lightning_speedkit.compress.weight_shapes import shape_difference, weight_shapes

_SAVED = {"0.weight": [2, 3], "0.bias": [2]}


@pytest.mark.parametrize(
    ("network", "told"),
    [
        (nn.Sequential(nn.Linear(3, 2)), ""),
        (nn.Sequential(nn.Linear(3, 2), nn.ReLU()), ""),
        (nn.Sequential(nn.Linear(4, 2)), "its parameter '0.weight' has shape (2, 4), in the file (2, 3)"),
        (nn.Sequential(nn.Linear(3, 2, bias=False)), "it has no parameter '0.bias', which is in the file"),
        (nn.Sequential(nn.Linear(3, 2), nn.PReLU()), "its parameter '1.weight' is not in the file"),
        (nn.Linear(3, 2), "it has no parameter '0.weight', which is in the file"),
    ],
)
def test_the_first_weight_that_differs_is_named(network: nn.Module, told: str) -> None:
    assert shape_difference(weight_shapes(network), _SAVED) == told

"""A fake LSTM on a CPU keeps what the real one keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_speedkit.memory import estimate_memory
from lightning_speedkit.memory.memory_estimate_workspace import RecurrentWorkspaces


class Workspaces(TorchDispatchMode):
    """Their bytes, as the layers return them."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mkldnn_rnn_layer.default:
            self.bytes.append(result[3].numel() * result[3].element_size())
        return result


def _layer_and_input(steps: int, count: int, inputs: int, width: int, both: bool) -> tuple[nn.Module, torch.Tensor]:
    layer = nn.LSTM(inputs, width, 2, batch_first=True, bidirectional=both)
    return layer, torch.randn(count, steps, inputs)


@pytest.mark.parametrize("sizes", [(64, 32, 128, 256), (33, 7, 20, 50), (100, 16, 96, 96), (1, 4, 8, 8)])
@pytest.mark.parametrize("both", [False, True])
def test_as_many_bytes_as_the_real_layer(sizes: tuple[int, int, int, int], both: bool) -> None:
    layer, x = _layer_and_input(*sizes, both)
    with Workspaces() as real:
        layer(x)
    if not real.bytes:
        pytest.skip("this build of torch has no recurrent layer of oneDNN")
    with FakeTensorMode():
        layer, x = _layer_and_input(*sizes, both)
        with RecurrentWorkspaces(), Workspaces() as fake:
            layer(x)[0].sum().backward()
    assert len(fake.bytes) == len(real.bytes) == (4 if both else 2)
    for guessed, kept in zip(fake.bytes, real.bytes, strict=True):
        assert abs(guessed - kept) <= 0.04 * kept  # it is rounded to pages


def test_the_estimate_holds_it_and_a_real_layer_is_left_alone() -> None:
    layer, x = _layer_and_input(64, 32, 128, 256, False)
    with Workspaces() as real:
        layer(x)
    if not real.bytes:
        pytest.skip("this build of torch has no recurrent layer of oneDNN")
    assert estimate_memory(layer, x).activations > sum(real.bytes)
    with RecurrentWorkspaces(), Workspaces() as again:
        layer(x)
    assert again.bytes == real.bytes

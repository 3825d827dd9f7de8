"""Which blocks are found, and what is said of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_speedkit.parallel.suggest_blocks import (
    KeptByBlock,
    bytes_of,
    find_blocks,
    profile_block,
    split_limit,
    why_no_pipeline,
)


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return result


class Net(nn.Module):
    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.head, self.blocks = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), blocks


def _chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8), Block(), Block(), Block(), nn.Linear(8, 2))


def test_blocks_repeat_and_have_modules_in_them() -> None:
    assert find_blocks(Net(_chain())) == (("blocks.1", "blocks.2", "blocks.3"), "blocks")
    assert find_blocks(Net(nn.ModuleList([Block(), Block()]))) == (("blocks.0", "blocks.1"), None)
    assert find_blocks(_chain()) == (("1", "2", "3"), None)  # the module itself is no attribute
    assert find_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == ((), None)


def test_the_container_with_most_parameters_counts() -> None:
    net = nn.ModuleDict({"small": nn.Sequential(Block(2), Block(2)), "large": nn.Sequential(Block(), Block())})
    assert find_blocks(net) == (("large.0", "large.1"), "large")


def test_what_a_pipeline_refuses() -> None:
    whole = nn.ModuleDict({"net": _chain()})
    assert why_no_pipeline(whole, "net") == ""
    assert why_no_pipeline(whole, None) == "the blocks are not in one nn.Sequential that is an attribute of the module"
    assert why_no_pipeline(Net(_chain()), "blocks") == "'blocks' does not hold all parameters that are trained"
    shared = _chain()
    shared[2].up.weight = shared[1].up.weight  # type: ignore[union-attr]
    assert why_no_pipeline(nn.ModuleDict({"net": shared}), "net") == "layers share weights"
    normed = nn.Sequential(Block(), nn.BatchNorm1d(8), Block())
    assert why_no_pipeline(nn.ModuleDict({"net": normed}), "net") == "BatchNorm would count micro-batches"
    frozen = Net(_chain())
    frozen.head.requires_grad_(False)
    assert why_no_pipeline(frozen, "blocks") == ""


def test_what_divides_the_linear_layers() -> None:
    assert split_limit(nn.ModuleList([Block(8), Block(12)]), ("0", "1")) == 4
    attention = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8), nn.Linear(8, 8))
    assert split_limit(nn.ModuleList([attention]), ("0",)) == 0
    assert split_limit(nn.ModuleList([nn.Sequential(nn.Linear(8, 8))]), ("0",)) == 0
    assert split_limit(Block(), ()) == 0


def test_what_autograd_keeps_of_each_block() -> None:
    net, x = _chain(), torch.randn(5, 3)
    tape = KeptByBlock(net, ("1", "2", "3"))
    with tape.recording():
        net(x).sum()
    # by hand, rows of 5: the norm's input, mean, 1/deviation and output, the result of relu, in floats of 4 bytes
    first = 4 * 5 * (8 + 1 + 1 + 8 + 32)
    assert tape.saved == {"1": first, "2": first, "3": first, "": 4 * 5 * (3 + 8)}  # the input, the last layer's
    assert tape.outputs == {"1": 160, "2": 160, "3": 160}
    assert tape.weight_copies == 0
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in net)
    block = profile_block("1", net[1], tape)
    assert (block.parameter_bytes, block.linear_bytes) == (4 * (16 + 2 * 256 + 40), 4 * (2 * 256 + 40))
    assert (block.class_name, block.activation_bytes, block.output_bytes) == ("Block", first, 160)


@pytest.mark.parametrize("grad", [True, False])
def test_autocasts_copies_of_weights_are_told_apart(grad: bool) -> None:
    net = nn.Sequential(nn.Conv1d(4, 4, 1), nn.Flatten(), nn.Linear(8, 6), nn.Linear(6, 2))
    tape = KeptByBlock(net, ())
    with tape.recording(), torch.autocast("cpu", torch.bfloat16):
        net(torch.randn(3, 4, 2, requires_grad=grad)).sum()
    # a linear layer keeps its weight where its input needs a gradient, a convolution always
    assert tape.weight_copies == 2 * (16 + 48 + 12)


def test_bytes_of_views_count_their_elements() -> None:
    assert bytes_of(torch.zeros(10)[:3].unbind()) == 12

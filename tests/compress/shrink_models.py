"""Networks whose channels are tied in the ways that are easy to get wrong, and an oracle for cutting them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_speedkit.compress.calls import Call
from lightning_speedkit.compress.shrink_plan import ShrinkPlan, ShrinkSettings, plan_shrink


class Residual(nn.Module):
    """Two residual blocks: the three layers that write into the sum lose the same channels."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.inner = nn.Conv2d(width, 12, 3, padding=1)
        self.outer = nn.Conv2d(12, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 1)
        self.head = nn.Linear(width * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = x + self.outer(torch.relu(self.inner(x)))
        x = x + self.second(x)
        return self.head(nn.functional.adaptive_avg_pool2d(x, 2).flatten(1))


class Mobile(nn.Module):
    """An inverted bottleneck: pointwise, depthwise, squeeze and excite, pointwise."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Conv2d(1, 16, 1)
        self.depth = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.norm = nn.BatchNorm2d(16)
        self.squeeze = nn.Linear(16, 4)
        self.excite = nn.Linear(4, 16)
        self.project = nn.Conv2d(16, 6, 1)
        self.head = nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.silu(self.norm(self.depth(self.expand(x))))
        gate = torch.sigmoid(self.excite(torch.relu(self.squeeze(x.mean((2, 3))))))
        return self.head(self.project(x * gate[:, :, None, None]).mean((2, 3)))


class Grouped(nn.Module):
    """A grouped convolution, whose groups must stay of one size, then one with another number of groups."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 12, 3, padding=1)
        self.grouped = nn.Conv2d(12, 24, 3, padding=1, groups=3)
        self.other = nn.Conv2d(24, 8, 3, padding=1, groups=2)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.grouped(torch.relu(self.first(x))))
        return self.head(torch.relu(self.other(x)).mean((2, 3)))


class Joining(nn.Module):
    """Concatenation and a transposed convolution, as in a U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Conv2d(1, 6, 3, padding=1)
        self.right = nn.Conv2d(1, 10, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(10, 8, 2, stride=2)
        self.join = nn.Conv2d(14, 12, 1)
        self.head = nn.Conv2d(12, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.left(x), self.up(torch.relu(self.right(x)))], dim=1)
        return self.head(torch.relu(self.join(x)))


class Attention(nn.Module):
    """Multi-head attention of plain layers; ``fused`` makes queries, keys and values by one of them."""

    def __init__(self, width: int = 16, heads: int = 4, fused: bool = True) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.fused = heads, width // heads, fused
        if fused:
            self.qkv = nn.Linear(width, 3 * width)
        else:
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        if self.fused:
            q, k, v = self.qkv(x).reshape(batch, length, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        else:
            shape = (batch, length, self.num_heads, self.head_dim)
            q, k, v = (part(x).view(shape).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj))
        x = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(batch, length, self.num_heads * self.head_dim))


class Transformer(nn.Module):
    """One pre-norm block on the rows of an image."""

    def __init__(self, fused: bool = True) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.position = nn.Parameter(torch.randn(1, 8, 16) * 0.1)
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attention = Attention(fused=fused)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.squeeze(1)) + self.position
        x = x + self.attention(self.norm1(x))
        x = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return self.head(x.mean(1))


def randomised(model: nn.Module) -> nn.Module:
    """``model`` in eval mode with always the same weights, norms that do something and no zero anywhere."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "var" in name:
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
            elif tensor.is_floating_point():
                size = tensor[0].numel() if tensor.ndim > 1 else 1
                tensor.copy_(torch.randn(tensor.shape, generator=generator) / size**0.5)
    return model.eval()


def images(count: int = 3) -> Tensor:
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(5))


def plan_of(model: nn.Module, ratio: float = 0.5, x: Tensor | None = None, **settings: Any) -> ShrinkPlan:
    twin = copy.deepcopy(model).eval()
    return plan_shrink(twin, [Call("", (images() if x is None else x,), {})], ShrinkSettings(ratio=ratio, **settings))


def with_zeros(
    model: nn.Module, readers: Mapping[str, int], cuts: Mapping[str, Mapping[int, Sequence[int]]]
) -> nn.Module:
    """A whole copy of ``model`` in which the weights named in ``readers`` are zero at the indices of that dimension
    that ``cuts`` does not keep. Written by hand for each network: the oracle knows nothing of groups."""
    twin = copy.deepcopy(model)
    weights = dict(twin.named_parameters())
    with torch.no_grad():
        for name, dim in readers.items():
            gone = [i for i in range(weights[name].shape[dim]) if i not in cuts[name][dim]]
            weights[name].index_fill_(dim, torch.tensor(gone, dtype=torch.long), 0.0)
    return twin

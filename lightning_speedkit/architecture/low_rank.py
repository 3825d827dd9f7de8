"""A linear layer as two thinner ones, whose product is the nearest matrix of that rank.

What it does: ``W`` of shape (out, in) becomes ``up @ down`` with ``rank`` columns between them, which takes
``rank * (in + out)`` multiply-adds for each row of the input instead of ``in * out``. It starts from the truncated
singular value decomposition, so the product is the best approximation of ``W`` that this rank allows, and the squared
error is the sum of the squared singular values that were left out.

When it helps: wide layers whose singular values fall off. What it costs: those values, and a second kernel for each
call. Fine-tune afterwards.

Source: C. Eckart and G. Young, "The approximation of one matrix by another of lower rank", 1936; used on networks by
E. Denton et al., "Exploiting Linear Structure Within Convolutional Networks for Efficient Evaluation", 2014.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import override

__all__ = ["FactoredLinear", "best_factors", "factor_linear", "squared_singular_values"]


class FactoredLinear(nn.Module):
    """A linear layer of limited rank: ``up(down(x))``, called as ``nn.Linear`` is, with the same attributes.

    ``weight`` is computed from the two factors each time it is read; to write to it changes nothing.

    Args:
        in_features: Size of the last dimension of the input.
        out_features: Size of the last dimension of the output.
        rank: Size between the two layers.
        bias: Whether ``up`` adds a bias.
        device: Where the weights are.
        dtype: Type of the weights.

    >>> layer = FactoredLinear(64, 32, rank=4)
    >>> layer(torch.zeros(2, 64)).shape, layer.weight.shape, sum(p.numel() for p in layer.parameters())
    (torch.Size([2, 32]), torch.Size([32, 64]), 416)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_rank(rank, min(in_features, out_features), f"Linear({in_features}, {out_features})")
        self.in_features, self.out_features, self.rank = in_features, out_features, rank
        self.down = nn.Linear(in_features, rank, bias=False, device=device, dtype=dtype)
        self.up = nn.Linear(rank, out_features, bias=bias, device=device, dtype=dtype)

    @property
    def weight(self) -> Tensor:
        """The product of the factors, of shape ``(out_features, in_features)``."""
        return self.up.weight @ self.down.weight

    @property
    def bias(self) -> nn.Parameter | None:
        """The bias, a parameter of ``up``."""
        return self.up.bias

    @override
    def forward(self, input: Tensor) -> Tensor:
        result: Tensor = self.up(self.down(input))
        return result

    @override
    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, rank={self.rank}"


def factor_linear(linear: nn.Linear, rank: int, *, warm_start: bool = True) -> FactoredLinear:
    """The layer of that rank which is nearest to ``linear``, with its device, dtype, mode and ``requires_grad``.

    ``linear`` is not changed. The bias of the result is the same parameter as that of ``linear``.

    Args:
        linear: A plain linear layer.
        rank: At least 1, at most the smaller of its two sizes; with that, the result computes the same.
        warm_start: Start from the truncated singular value decomposition; otherwise from torch's own random weights.

    Raises:
        ValueError: The rank is out of range, or the weights to start from have no data or are not finite.

    >>> linear = nn.Linear(16, 8)
    >>> x = torch.randn(4, 16)
    >>> bool(torch.allclose(factor_linear(linear, 8)(x), linear(x), atol=1e-5))
    True
    """
    weight = linear.weight
    made = FactoredLinear(
        linear.in_features,
        linear.out_features,
        rank,
        bias=linear.bias is not None,
        device="meta" if warm_start else weight.device,  # weights that are replaced draw no random numbers
        dtype=weight.dtype,
    )
    if warm_start:
        up, down = best_factors(weight.detach().unsqueeze(0), rank)
        made.up.weight, made.down.weight = nn.Parameter(up[0]), nn.Parameter(down[0])
        if linear.bias is not None:
            made.up.bias = linear.bias
    elif linear.bias is not None:
        made.up.bias.requires_grad_(linear.bias.requires_grad)
    for factor in (made.up, made.down):
        factor.weight.requires_grad_(weight.requires_grad)
    return made.train(linear.training)


def best_factors(matrices: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """For each matrix of shape ``(n, rows, columns)`` the factors ``up`` and ``down`` of its nearest one of that rank.

    ``up`` is ``(n, rows, rank)`` and ``down`` is ``(n, rank, columns)``; both carry the square root of the singular
    values, so that they train at the same pace. Computed in float64, returned in the dtype and on the device of
    ``matrices``.

    >>> up, down = best_factors(torch.tensor([[[3.0, 0.0], [0.0, 1.0]]]), 1)
    >>> (up @ down).abs().round(decimals=5).tolist()
    [[[3.0, 0.0], [0.0, 0.0]]]
    """
    _check_rank(rank, min(matrices.shape[-2:]), f"a matrix of {matrices.shape[-2]} by {matrices.shape[-1]}")
    exact = _in_float64(matrices)
    tall = exact.shape[-2] >= exact.shape[-1]
    small = exact.mT @ exact if tall else exact @ exact.mT  # its eigenvectors cost far less than a full decomposition
    values, vectors = torch.linalg.eigh(small)  # ascending
    root = values[..., -rank:].flip(-1).clamp(min=0).sqrt().sqrt()
    root = torch.where(root > root[..., :1] * 1e-4, root, torch.ones_like(root))  # nothing is divided by zero
    kept = vectors[..., -rank:].flip(-1)
    if tall:
        up, down = (exact @ kept) / root.unsqueeze(-2), kept.mT * root.unsqueeze(-1)
    else:
        up, down = kept * root.unsqueeze(-2), (kept.mT @ exact) / root.unsqueeze(-1)
    like = {"device": matrices.device, "dtype": matrices.dtype}
    return up.to(**like).contiguous(), down.to(**like).contiguous()


def squared_singular_values(matrices: Tensor) -> Tensor:
    """The squared singular values of each matrix of shape ``(n, rows, columns)``, largest first, in float64.

    >>> squared_singular_values(torch.tensor([[[3.0, 0.0], [0.0, 1.0]]]))
    tensor([[9., 1.]], dtype=torch.float64)
    """
    exact = _in_float64(matrices)
    small = exact.mT @ exact if exact.shape[-2] >= exact.shape[-1] else exact @ exact.mT
    values: Tensor = torch.linalg.eigvalsh(small)
    return values.flip(-1).clamp(min=0)


def _in_float64(matrices: Tensor) -> Tensor:
    if matrices.is_meta:
        raise ValueError("The weights are on the meta device and have no data to start from; pass warm_start=False.")
    if not bool(torch.isfinite(matrices).all()):
        raise ValueError("The weights are not finite; they cannot be decomposed.")
    place = matrices.device if matrices.device.type in ("cpu", "cuda") else torch.device("cpu")  # MPS has no float64
    return matrices.detach().to(place, torch.float64)


def _check_rank(rank: int, largest: int, of: str) -> None:
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise TypeError(f"rank is a whole number, got {rank!r}.")
    if not 1 <= rank <= largest:
        raise ValueError(f"rank={rank} of {of} must be from 1 to {largest}.")

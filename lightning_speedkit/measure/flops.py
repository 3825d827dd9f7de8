"""How many floating-point operations something takes, whatever kernels compute it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

__all__ = ["count_flops"]


def count_flops(run: Callable[[], object]) -> int:
    """The operations of the convolutions and matrix products in ``run``: two for each multiplication with addition.

    By torch's own counter, which does not look into fused kernels. So attention is computed by its products meanwhile,
    and torch's fast path through transformer layers is off. What is no product (norms, activations, pooling) counts
    nothing.

    >>> x = torch.zeros(2, 4, 16, 8)
    >>> count_flops(lambda: torch.nn.functional.scaled_dot_product_attention(x, x, x)) == 2 * 2 * (2 * 4 * 16 * 16 * 8)
    True
    """
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            run()
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
    return int(counter.get_total_flops())

"""Clipping thresholds that follow the gradient norms of the run, so that nobody has to guess one.

What they do: :class:`ZScoreLimit` (ZClip) keeps a moving mean and variance of the norm and cuts down what lies far
above; :class:`PercentileLimit` (AutoClip) cuts every norm down to a percentile of those so far. When they help: the
norm changes over the run by more than a fixed threshold can follow. What they cost: a dozen operations on one number
per optimizer step, on the device of the gradients; the host never waits for it. A norm that is not finite is not
counted.

Sources: Kumar et al., ZClip: Adaptive Spike Mitigation for LLM Pre-Training, 2025 (arXiv 2504.02507), for z = 2.5,
smoothing 0.97 and 25 steps of warm-up; Seetharaman et al., AutoClip: Adaptive Gradient Clipping for Source Separation
Networks, 2020 (arXiv 2007.14469), for the 10th percentile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["PercentileLimit", "ZScoreLimit", "zscore_limit"]


@torch.no_grad()
def zscore_limit(
    norm: Tensor, moments: Tensor, z: float = 2.5, smoothing: float = 0.97, warmup: int = 25
) -> tuple[Tensor, Tensor]:
    """The norm that a gradient may have, and the moments with that norm counted.

    A norm whose score ``s = (norm - mean) / deviation`` is above ``z`` may be ``mean + z * z / s * deviation``: the
    farther out, the closer to the mean. The first ``warmup`` norms are all allowed; they give the first moments.

    Args:
        norm: The gradient norm, a tensor of no dimension.
        moments: How many norms were counted, their mean and their variance: 3 numbers, at first zeros, on the device
            of ``norm``.
        z: The score above which a norm is cut down.
        smoothing: The weight of the old moments.
        warmup: How many norms are only counted.

    Returns:
        The allowed norm, equal to ``norm`` if it is no outlier; and the new moments. Of an outlier the allowed norm is
        counted, not what it was. A norm that is not finite changes no moment.

    >>> moments = torch.tensor([25.0, 1.0, 0.01])  # mean 1, deviation 0.1
    >>> limit, moments = zscore_limit(torch.tensor(2.0), moments)  # a score of 10
    >>> round(limit.item(), 4)
    1.0625
    """
    count, mean, variance = moments.unbind()
    deviation = variance.sqrt()
    score = (norm - mean) / (deviation + 1e-6)
    warming = count < warmup
    limit = torch.where((score > z) & ~warming, mean + z * z * deviation / score, norm)
    weight = torch.where(warming, 1 / (count + 1), 1 - smoothing)
    new_mean = mean + weight * (limit - mean)
    off = (limit - mean) * torch.where(warming, limit - new_mean, (limit - mean) * (1 - weight) ** 2)
    # Warm-up: the population variance of all norms so far. After it: the moving mean of (norm - new mean) squared.
    new_variance = (1 - weight) * variance + weight * off
    counted = torch.stack([count + 1, new_mean, new_variance])
    return limit, torch.where(norm.isfinite(), counted, moments)


class ZScoreLimit:
    """The threshold of ZClip; see :func:`zscore_limit` for the rule and the arguments.

    >>> limit = ZScoreLimit(warmup=4)
    >>> for norm in (0.9, 1.1, 0.9, 1.1):
    ...     _ = limit(torch.tensor(norm))
    >>> round(limit(torch.tensor(2.0)).item(), 4)
    1.0625
    """

    def __init__(self, z: float = 2.5, smoothing: float = 0.97, warmup: int = 25) -> None:
        self.z, self.smoothing, self.warmup = z, smoothing, warmup
        self._moments = torch.zeros(3)

    def __call__(self, norm: Tensor) -> Tensor:
        """The norm that a gradient of this norm may have; counts it."""
        if self._moments.device != norm.device:
            self._moments = self._moments.to(norm.device)
        limit, self._moments = zscore_limit(norm, self._moments, self.z, self.smoothing, self.warmup)
        return limit

    def state_dict(self) -> dict[str, Any]:
        """The moments, on the CPU."""
        return {"moments": self._moments.cpu().clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned."""
        self._moments = state["moments"].clone()


class PercentileLimit:
    """The threshold of AutoClip: a percentile of the norms so far, the present one included.

    Args:
        percentile: Between 0 and 100.
        history: How many norms are kept; the oldest go first.

    >>> limit = PercentileLimit(50)
    >>> [limit(torch.tensor(norm)).item() for norm in (1.0, 3.0, 8.0)]
    [1.0, 2.0, 3.0]
    """

    def __init__(self, percentile: float = 10.0, history: int = 1000) -> None:
        self.percentile = percentile
        self._norms = torch.full((history,), float("nan"))
        self._next = 0

    @torch.no_grad()
    def __call__(self, norm: Tensor) -> Tensor:
        """The norm that a gradient of this norm may have; counts it."""
        if self._norms.device != norm.device:
            self._norms = self._norms.to(norm.device)
        self._norms[self._next % len(self._norms)] = torch.where(norm.isfinite(), norm, float("nan"))
        self._next += 1
        kept = self._norms[: self._next]
        limit = kept.nanquantile(self.percentile / 100)
        return torch.where(limit.isnan(), norm, limit)

    def state_dict(self) -> dict[str, Any]:
        """The kept norms, on the CPU, and how many were counted."""
        return {"norms": self._norms.cpu().clone(), "next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned."""
        if len(state["norms"]) != len(self._norms):
            raise ValueError(
                f"The checkpoint keeps {len(state['norms'])} norms and history={len(self._norms)}; use the same number."
            )
        self._norms, self._next = state["norms"].clone(), state["next"]

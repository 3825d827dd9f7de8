"""Weights with the 2:4 pattern in the form that NVIDIA's sparse tensor cores compute with.

What it does: ``to_semi_structured`` gives the weights of linear layers that have at least two zeros in each four inputs
to ``torch.sparse.to_sparse_semi_structured``. When it helps: inference with large linear layers in 16 bits, on GPUs of
compute capability 8.0 and above; there a matrix product has half the work. What it costs: the module can then be
neither trained on nor loaded into, which is why the callback does it to a copy.

Source: Mishra et al., 2021 (arXiv 2104.08378); the documentation of ``torch.sparse``. Never run on a GPU by us.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_speedkit.compress.prune_masks import is_two_of_four

__all__ = ["runs_semi_structured", "to_semi_structured"]


def runs_semi_structured(device: torch.device) -> bool:
    """Whether this device has sparse tensor cores.

    >>> runs_semi_structured(torch.device("cpu"))
    False
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0) and torch.version.hip is None


def to_semi_structured(module: nn.Module) -> dict[str, str]:
    """Convert, in place, the weights of all linear layers that have the pattern and lie on a device that can use it.

    Returns:
        For each linear layer by name ``"converted"``, or why it was left as it is.

    >>> to_semi_structured(nn.Sequential(nn.Linear(8, 8)))
    {'0': 'its weights do not have the 2:4 pattern'}
    """
    told = {}
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear):
            told[name] = _convert(layer)
    return told


def _convert(layer: nn.Linear) -> str:
    weight = layer.weight
    if not is_two_of_four(weight):
        return "its weights do not have the 2:4 pattern"
    if not runs_semi_structured(weight.device):
        return f"its weights are on {weight.device}, which has no sparse tensor cores"
    convert: Any = torch.sparse.to_sparse_semi_structured
    try:
        made = convert(weight.detach())
    except (RuntimeError, ValueError) as error:  # a dtype or a shape that its kernels do not take
        return str(error).splitlines()[0]
    layer.weight = nn.Parameter(made, requires_grad=False)
    return "converted"

"""Small samples that the tests of this folder share, and an exact comparison."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def varied_samples(count: int) -> list[dict[str, Any]]:
    """Samples of every kind of leaf, of which some vary in shape."""
    generator = torch.Generator().manual_seed(5)
    return [
        {
            "image": torch.randint(0, 256, (3, 4 + i % 3, 5), dtype=torch.uint8, generator=generator),
            "boxes": np.arange(4 * (i % 4), dtype=np.float32).reshape(i % 4, 4),
            "label": i,
            "pair": (i / 3, [i % 2 == 0, b"\x00\xff" * (i % 5)]),
            "name": f"sample {i} ä",
            "half": torch.full((2,), i, dtype=torch.bfloat16),
        }
        for i in range(count)
    ]


def same(first: Any, second: Any) -> bool:
    """Equal in type, structure, dtype, shape and every bit."""
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, tuple | list):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and first.shape == second.shape and _bytes(first) == _bytes(second)
    if isinstance(first, np.ndarray | np.generic):
        return first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes()
    if isinstance(first, float):
        return first.hex() == second.hex()
    return bool(first == second)


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())

"""A tensor that a graph does not take is refused with what was got, what is allowed, and what to do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_speedkit.compress.tensor_inputs import TensorInput, check_inputs

_FLOAT = TensorInput("x", (None, 3), torch.float32, converts=True)
_INDEX = TensorInput("batch['ids']", (None,), torch.int64, converts=True)
_EXACT = TensorInput("x", (2, 3), torch.float32)


@pytest.mark.parametrize(
    ("wanted", "tensor"),
    [
        (_FLOAT, torch.ones(5, 3)),
        (_FLOAT, torch.ones(0, 3)),
        (_FLOAT, torch.ones(5, 3, dtype=torch.bfloat16)),
        (_FLOAT, torch.ones(5, 3, dtype=torch.uint8)),
        (_INDEX, torch.ones(4, dtype=torch.int32)),
        (_EXACT, torch.ones(2, 3)),
        (None, torch.ones(9, 9, 9)),
    ],
)
def test_what_fits_is_taken(wanted: TensorInput | None, tensor: Tensor) -> None:
    check_inputs("Net", [wanted], [tensor])


@pytest.mark.parametrize(
    ("wanted", "tensor", "told"),
    [
        (
            _FLOAT,
            torch.ones(5, 4),
            "takes x of shape (any, 3) and dtype float32, and got shape (5, 4) and",
        ),
        (_FLOAT, torch.ones(5, 4), "quantize with batches of several sizes."),
        (
            _FLOAT,
            torch.ones(3),
            "got shape (3,) and dtype float32. It has no batch dimension: give x.unsqueeze(0).",
        ),
        (_FLOAT, torch.ones(1, 5, 3), "and got shape (1, 5, 3)"),
        (_FLOAT, torch.ones(5, 3).cfloat(), "dtype complex64. Convert it: x.to(torch.float32)."),
        (
            _INDEX,
            torch.ones(4),
            "batch['ids'] of shape (any,) and dtype int64, and got shape (4,) and dtype float32",
        ),
        (_EXACT, torch.ones(4, 3), "takes x of shape (2, 3) and"),
        (_EXACT, torch.ones(2, 3).double(), "dtype float64. Convert it: x.to(torch.float32)."),
    ],
)
def test_what_does_not_fit_is_told(wanted: TensorInput, tensor: Tensor, told: str) -> None:
    with pytest.raises(ValueError, match=r"^The quantized forward of Net takes") as refusal:
        check_inputs("Net", [None, wanted], [torch.ones(1), tensor])
    assert told in str(refusal.value)

"""What a user gives is refused in words that say what to write, before anything is converted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_speedkit.compress.calls import Call
from lightning_speedkit.compress.quantize_arguments import calls_from, check_float_answers, check_skip
from lightning_speedkit.errors import QuantizationError


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def test_a_misspelt_skip_is_refused_and_one_that_matches_is_not() -> None:
    model = nn.Module()
    model.encoder, model.head = _net(), nn.Linear(2, 2)
    given = ["head", "encoder", "encoder.*", "?ead"]
    assert check_skip(model, given) == given
    with pytest.raises(
        ValueError, match=r"skip='haed' matches no module\. Did you mean 'head'\? Layers: 'encoder.0', "
    ):
        check_skip(model, ["encoder", "haed"])
    with pytest.raises(ValueError, match=r"skip='\*\.2\.\*' matches no module"):
        check_skip(model, ["*.2.*"])


def test_names_of_a_compiled_module_are_those_without_the_wrapper() -> None:
    model = nn.Sequential(torch.compile(_net(), backend="eager"))
    assert "0._orig_mod.2" in dict(model.named_modules())
    check_skip(model, ["0", "0.2"])


@pytest.mark.parametrize(
    ("model", "batches", "error", "message"),
    [
        (nn.Linear, [torch.ones(1, 4)], TypeError, "takes an nn.Module, got the class itself"),
        ("model.pt", [torch.ones(1, 4)], TypeError, "takes an nn.Module, got 'model.pt'"),
        (_net(), torch.ones(3, 4), TypeError, r"got one Tensor; write \[batch\]"),
        (_net(), {"input": torch.ones(3, 4)}, TypeError, "got one dict"),
        (_net(), None, TypeError, "got one NoneType"),
        (_net(), [], ValueError, "needs at least one batch"),
        (nn.LazyLinear(3), [torch.ones(3, 4)], QuantizationError, "lazy layers without a shape"),
        (nn.Linear(4, 2, device="meta"), [torch.ones(3, 4)], QuantizationError, "on the meta device"),
    ],
)
def test_models_and_batches_of_another_kind(model: Any, batches: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        calls_from(model, batches, "convert_model")


def test_labels_among_the_arguments_are_named_as_the_cause() -> None:
    calls = calls_from(_net(), [(torch.ones(3, 4), torch.zeros(3))], "convert_model")
    with pytest.raises(QuantizationError, match=r"cannot be called .*takes 2 positional arguments.*labels are none"):
        check_float_answers(_net(), calls)


def test_a_float_model_that_answers_with_nan_is_refused_and_one_with_infinity_is_not() -> None:
    net = _net()
    call = Call("", (torch.ones(3, 4),), {})
    with torch.no_grad():
        net[2].bias[0] = -float("inf")  # type: ignore[index]
    check_float_answers(net, [call])
    with torch.no_grad():
        net[2].bias[0] = float("nan")  # type: ignore[index]
    with pytest.raises(QuantizationError, match="answers the batches with NaN"):
        check_float_answers(net, [call])

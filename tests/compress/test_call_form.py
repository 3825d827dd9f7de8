"""The form of a call finds the tensors of another call and puts answers where they belong."""

from __future__ import annotations

import json
from collections import namedtuple
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from lightning_speedkit.compress.call_form import CallForm, form_of
from lightning_speedkit.errors import QuantizationError


class _Net(nn.Module):
    def forward(self, x: Tensor, *rest: Tensor, mode: str = "sum", mask: Tensor | None = None, **more: Any) -> Any:
        return {"x": x, "list": [x + 1, None], "n": 3}


Pair = namedtuple("Pair", ["a", "b"])


def _answer(x: Tensor) -> dict[str, Any]:
    return {"x": x, "list": [x + 1, None], "n": 3}


def _form() -> CallForm:
    x = torch.ones(2, 1)
    return form_of(_Net(), (x, x * 2), {"extra": {"deep": (x * 3,)}}, _answer(x))


def test_tensors_of_another_call_come_in_the_same_order() -> None:
    x = torch.zeros(5, 1)
    assert _form().difference((x, x + 1), {"extra": {"deep": (x + 2,)}}) == ""
    found = _form().tensors((x, x + 1), {"extra": {"deep": (x + 2,)}})
    assert [float(t[0, 0]) for t in found] == [0, 1, 2]
    assert _form().count == 3


def test_filled_arguments_are_those_of_the_call() -> None:
    a, b, c = torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0)
    args, kwargs = _form().filled([a, b, c])
    assert args == [a, b]
    assert kwargs == {"mode": "sum", "mask": None, "extra": {"deep": (c,)}}
    assert _Net()(*args, **kwargs)["n"] == 3


def test_answers_keep_their_structure_and_what_is_no_tensor() -> None:
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    assert _form().answered([one, two]) == {"x": one, "list": [two, None], "n": 3}
    pair = form_of(_Net(), (one,), {}, Pair(one, (two,))).answered([one, two])
    assert isinstance(pair, Pair)
    assert pair == Pair(one, (two,))


def test_json_holds_all_of_it() -> None:
    form = _form()
    assert CallForm.from_plain(json.loads(json.dumps(form.to_plain()))) == form


@pytest.mark.parametrize(
    ("args", "kwargs", "told"),
    [
        ((torch.ones(2, 1),), {}, "rest[0] is missing; extra['deep'][0] is missing"),
        (
            (torch.ones(2, 1), torch.ones(2, 1)),
            {"mode": "mean", "extra": {"deep": (torch.ones(2, 1),)}, "mask": torch.ones(1)},
            "mode is 'mean', and was 'sum'; mask is given, and was not",
        ),
        ((torch.ones(2, 1), torch.ones(2, 1)), {"extra": {"deep": [torch.ones(2, 1)]}}, "nested otherwise"),
    ],
)
def test_a_call_of_another_form_is_refused_by_what_differs(args: Any, kwargs: dict[str, Any], told: str) -> None:
    assert told in _form().difference(args, kwargs)
    with pytest.raises(ValueError, match=r"forward of _Net can only be called as .*backend='torch-ao-dynamic'") as why:
        _form().tensors(args, kwargs)
    assert told in str(why.value)


def test_an_argument_that_is_neither_tensor_nor_plain_is_refused() -> None:
    with pytest.raises(QuantizationError, match="its argument 'more' is neither a tensor nor plain Python"):
        form_of(_Net(), (torch.ones(1),), {"odd": object()}, torch.ones(1))
    with pytest.raises(QuantizationError, match="without a tensor"):
        form_of(nn.Identity(), (3,), {}, torch.ones(1))


def test_an_array_is_refused_as_what_it_is() -> None:
    form = form_of(nn.Linear(2, 1), (torch.ones(3, 2),), {}, torch.ones(3, 1))
    with pytest.raises(ValueError, match=r": input is array\(\[\[1., 1.\], \[1., 1.\],.*, and was a tensor\."):
        form.tensors((numpy.ones((3, 2)),), {})


@pytest.mark.parametrize("change", [{"parameters": []}, {"parameters": [["input", "WHAT", None, False]]}])
def test_a_damaged_form_is_refused_when_it_is_read(change: Any) -> None:
    form = form_of(nn.Linear(2, 1), (torch.ones(3, 2),), {}, torch.ones(3, 1))
    with pytest.raises(ValueError, match=r"there is no parameter, or no kind of one, '(input|WHAT)'"):
        CallForm.from_plain({**form.to_plain(), **change})

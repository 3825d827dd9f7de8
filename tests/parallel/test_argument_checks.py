"""Arguments of strategies, right and wrong."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch

from lightning_speedkit.parallel.argument_checks import check_number, check_switch, checked_integer, checked_timeout


@pytest.mark.parametrize("value", ["2", 2.0, True, None, [2], torch.tensor(1.5)], ids=str)
def test_what_is_no_whole_number(value: Any) -> None:
    with pytest.raises(TypeError):
        checked_integer("rank", value, 1)


@pytest.mark.parametrize("value", [1, np.int64(1), torch.tensor(1)], ids=repr)
def test_whole_numbers_of_any_kind(value: Any) -> None:
    number = checked_integer("rank", value, 1)
    assert (type(number), number) == (int, 1)


def test_a_number_that_is_too_small() -> None:
    with pytest.raises(ValueError, match="rank=-3 must be at least 0"):
        checked_integer("rank", -3, 0)


def test_switches_and_numbers() -> None:
    check_switch("s", False)
    check_number("n", np.float32(1))
    assert checked_timeout(1.5) == timedelta(seconds=1.5)
    with pytest.raises(TypeError, match="s=1 must be True or False"):
        check_switch("s", 1)
    with pytest.raises(TypeError, match="n=True must be a number"):
        check_number("n", True)

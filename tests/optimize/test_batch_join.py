"""Outputs of pieces become those of the whole batch, or it is said that they cannot."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from lightning_speedkit.optimize.batch_join import join_outputs
from lightning_speedkit.optimize.batch_split import split_batch


def test_outputs_are_joined_to_those_of_the_whole_batch() -> None:
    def output(x: Tensor) -> dict[str, Any]:
        return {"loss": x.mean(), "y": 2 * x, "names": [str(v) for v in x.tolist()], "pair": (x.mean().item(), None)}

    x = torch.arange(5.0)
    joined = join_outputs([output(piece) for piece in split_batch(x, 2)], [2, 2, 1])
    whole = output(x)
    assert joined["loss"].item() == pytest.approx(whole["loss"].item())
    assert torch.equal(joined["y"], whole["y"])
    assert joined["names"] == whole["names"]
    assert joined["pair"] == pytest.approx(whole["pair"])
    assert join_outputs([None, None], [1, 2]) is None
    assert join_outputs(["a", "a"], [1, 2]) == "a"


@pytest.mark.parametrize(
    "outputs", [[torch.zeros(3, 2), torch.zeros(4, 2)], [1, None], ["a", "b"], [{"a": 1.0}, {"b": 1.0}], [3, 4]]
)
def test_outputs_that_cannot_be_joined_say_so(outputs: list[Any]) -> None:
    with pytest.raises(ValueError, match="cannot be joined"):
        join_outputs(outputs, [1, 1])


@pytest.mark.parametrize("weights", [[0.25, 0.0, 0.75], [torch.tensor(1), torch.tensor(0), torch.tensor(3)]])
def test_means_are_by_weight_where_there_are_weights(weights: list[Any]) -> None:
    values = [1.0, float("nan"), 5.0]
    outputs = [{"loss": torch.tensor(value), "number": value, "rows": torch.full((2,), value)} for value in values]
    joined = join_outputs(outputs, [2, 2, 2], weights)
    assert (joined["loss"].item(), joined["number"]) == (4.0, 4.0)
    assert len(joined["rows"]) == 6
    assert join_outputs([torch.tensor(1), torch.tensor(4)], [2, 1]).item() == 2.0  # of whole numbers
    assert numpy.isnan(join_outputs([1.0, 2.0], [2, 1], [0, 0]))  # a mean over nothing
    third = torch.tensor(1 / 3, dtype=torch.float64)
    assert join_outputs([third, 4 * third], [2, 1]).item() == pytest.approx(2 / 3, rel=1e-15)

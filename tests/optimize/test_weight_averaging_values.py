"""The average of weights against closed formulas and numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from lightning_speedkit.optimize.weight_averaging_values import WeightAverage


def _line(value: float = 0.0, dtype: torch.dtype = torch.float64) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False, dtype=dtype)
    nn.init.constant_(model.weight, value)
    return model


def _average_of(values: list[float], average: WeightAverage, dtype: torch.dtype = torch.float64) -> float:
    model = _line(dtype=dtype)
    for value in values:
        nn.init.constant_(model.weight, value)
        average.update(model)
    with average.applied_to(model):
        found = model.weight.item()
    assert model.weight.item() == torch.tensor(values[-1], dtype=dtype).item()
    return found


def test_ema_and_swa_by_hand() -> None:
    assert _average_of([1.0, 2.0, 6.0], WeightAverage("swa")) == pytest.approx(3.0, rel=1e-15)
    # 8, then 0.75 * 8 + 0.25 * 4 = 7, then 0.75 * 7 + 0.25 * 1 = 5.5
    assert _average_of([8.0, 4.0, 1.0], WeightAverage("ema", 0.75, warmup=False)) == 5.5
    # decays 2/11 and 3/12: 8, then (2 * 8 + 9 * 4) / 11 = 52/11, then 52/44 + 3/4 = 85/44
    assert _average_of([8.0, 4.0, 1.0], WeightAverage("ema", 0.75)) == pytest.approx(85 / 44, rel=1e-14)
    assert _average_of([8.0, 4.0, 1.0], WeightAverage("ema", 0.0)) == 1.0


def test_weights_of_16_bits_are_averaged_in_32() -> None:
    # 1 + 200 * 0.001 * 2 or so: each step is less than half of bfloat16's spacing of 0.0078
    expected = 3.0 - 2.0 * 0.999**200
    average = WeightAverage("ema", 0.999, warmup=False)
    found = _average_of([1.0] + [3.0] * 200, average, torch.bfloat16)
    assert found == pytest.approx(expected, rel=0.004)
    (kept,) = average.widened().values()
    assert kept.dtype == torch.float32
    assert kept.item() == pytest.approx(expected, rel=1e-5)


def test_before_the_first_update_nothing_is_put_in() -> None:
    model, average = _line(5.0), WeightAverage()
    with average.applied_to(model):
        assert not average.in_use
        assert model.weight.item() == 5.0


def test_an_exception_gives_the_weights_back() -> None:
    model, average = _line(1.0), WeightAverage("swa")
    average.update(model)
    nn.init.constant_(model.weight, 3.0)
    with pytest.raises(ZeroDivisionError), torch.inference_mode(), average.applied_to(model):
        _ = model.weight.item() / (model.weight.item() - 1.0)
    assert model.weight.item() == 3.0
    average.update(model)
    average.use(model)
    assert model.weight.item() == 2.0
    with pytest.raises(RuntimeError, match="put_back"):
        average.update(model)


class _Parts(nn.Module):
    """A frozen, a shared and a plain parameter, a BatchNorm, and buffers whose average makes no sense."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.shared = nn.Linear(2, 2)
        self.shared.weight = self.plain.weight
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))


def test_what_is_averaged_and_what_is_left_alone() -> None:
    model, average = _Parts(), WeightAverage("swa")
    start = {name: value.clone() for name, value in model.state_dict().items()}
    average.update(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 2.0
    model.norm.running_mean += 2.0
    model.norm.num_batches_tracked += 2
    average.update(model)
    live, averaged = average.split_state(model, model.state_dict())
    torch.testing.assert_close(live, dict(model.state_dict()), rtol=0, atol=0)
    for name in start:
        own = name in ("frozen", "mask", "norm.num_batches_tracked", "norm.running_var")
        torch.testing.assert_close(averaged[name], live[name] if own else start[name] + 1.0, msg=name)
    assert "shared.weight" in averaged
    kept = {name: value.clone() for name, value in live.items()}
    with average.applied_to(model):
        assert model.frozen.tolist() == [3.0, 3.0]
        assert model.norm.num_batches_tracked == 2
        torch.testing.assert_close(dict(model.state_dict()), averaged)
        torch.testing.assert_close(average.split_state(model, model.state_dict()), (kept, averaged))


def test_pruning_may_rename_reorder_and_remove() -> None:
    model, average = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), WeightAverage("swa")
    weight = model[0].weight
    nn.init.constant_(weight, 1.0)
    average.update(model)
    mask = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    prune.custom_from_mask(model[0], "weight", mask)
    nn.init.constant_(weight, 4.0)
    average.update(model)
    x = torch.eye(2)
    with average.applied_to(model):
        torch.testing.assert_close(model[0](x), x @ (mask * 2.5).T + model[0].bias)
        assert torch.equal(model[0].weight_mask, mask)
    folded = {name: value for name, value in model.state_dict().items() if "_orig" not in name and "_mask" not in name}
    _, averaged = average.split_state(model, {**folded, "0.weight": mask * 4.0})
    torch.testing.assert_close(averaged["0.weight"], mask * 2.5)
    prune.remove(model[0], "weight")
    with average.applied_to(model):
        torch.testing.assert_close(model[0].weight.detach(), mask * 2.5)
    torch.testing.assert_close(model[0].weight.detach(), mask * 4.0)


def test_pruning_while_the_average_is_in_the_module() -> None:
    model, average = nn.Linear(2, 1, bias=False), WeightAverage("swa")
    nn.init.constant_(model.weight, 1.0)
    average.update(model)
    nn.init.constant_(model.weight, 3.0)
    with average.applied_to(model):
        prune.custom_from_mask(model, "weight", torch.tensor([[1.0, 0.0]]))
    assert model.weight_orig.tolist() == [[3.0, 3.0]]


def test_a_tensor_of_another_shape_starts_anew_and_a_frozen_one_goes_on() -> None:
    model, average = nn.Linear(2, 2), WeightAverage("swa")
    nn.init.constant_(model.bias, 1.0)
    average.update(model)
    model.weight = nn.Parameter(torch.full((1, 2), 5.0))
    nn.init.constant_(model.bias, 3.0)
    model.bias.requires_grad_(False)
    average.update(model)
    with average.applied_to(model):
        assert model.weight.tolist() == [[5.0, 5.0]]
        assert model.bias.tolist() == [2.0, 2.0]


def test_an_average_that_is_saved_and_loaded_goes_on() -> None:
    whole, first, second = (WeightAverage("swa") for _ in range(3))
    model = _line(1.0)
    whole.update(model)
    first.update(model)
    other = _line(7.0)
    second.load(other, first.split_state(model, model.state_dict())[1], updates=1, names=first.names())
    for average in (whole, second):
        average.update(other)
        with average.applied_to(other):
            assert other.weight.item() == 4.0
    second.move("cpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"by": "mean"}, "'ema'"), ({"decay": 1.0}, "less than 1"), ({"decay": float("nan")}, "decay=nan must")],
)
def test_bad_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeightAverage(**arguments)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"decay='0.999' must be a number; got str. Write it without quotes"):
        WeightAverage(decay="0.999")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="warmup='no' must be true or false"):
        WeightAverage(warmup="no")  # type: ignore[arg-type]

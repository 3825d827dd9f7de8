"""Weights rounded by torchao, held against numbers worked out by hand, and what its import does not leave behind."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from lightning_speedkit.compress.torchao_weights import INT4_GROUP, quantize_layers, quiet_torchao

LOGGERS = ("torchao", "torch.utils._pytree")


def _layer(*rows: list[float]) -> nn.Linear:
    layer = nn.Linear(len(rows[0]), len(rows), bias=False)
    layer.weight = nn.Parameter(torch.tensor(rows))
    return layer


def test_int8_has_one_scale_per_output() -> None:
    # the largest of 256 values is 127, its step the largest weight / 127.5
    net = nn.Sequential(_layer([1.275, -0.51, 0.0, 0.1], [0.0, 0.0, -2.55, 0.3]))
    quantize_layers(net, ["0"], "weight-only-int8", "cpu")
    weight: Any = net[0].weight
    assert weight.qdata.dtype == torch.int8
    assert weight.qdata.tolist() == [[127, -51, 0, 10], [0, 0, -128, 15]]
    torch.testing.assert_close(weight.scale.flatten(), torch.tensor([0.01, 0.02]))
    with torch.no_grad():
        answer = net(torch.tensor([[1.0, 1.0, 1.0, 1.0]]))
    # the sums of the rows, 86 and -113, times their steps
    torch.testing.assert_close(answer, torch.tensor([[0.86, -2.26]]))


def test_int4_has_one_scale_per_group() -> None:
    assert INT4_GROUP == 32
    row = [0.0] * 64
    row[0:3], row[32:34] = [0.75, -0.75, 0.2], [-1.5, 0.6]
    net = nn.Sequential(_layer(row))
    quantize_layers(net, ["0"], "weight-only-int4", "cpu")
    weight: Any = net[0].weight
    # the steps are 0.75 / 7.5 and 1.5 / 7.5, the values from -8 to 7
    torch.testing.assert_close(weight.scale, torch.tensor([[0.1, 0.2]]))
    expected = torch.zeros(1, 64, dtype=torch.int8)
    expected[0, 0:3], expected[0, 32:34] = torch.tensor([7, -8, 2]), torch.tensor([-8, 3])
    assert torch.equal(weight.qdata, expected)


def test_only_the_named_layers_are_touched() -> None:
    net = nn.Sequential(nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)))
    kept = {name: value.detach().clone() for name, value in net.named_parameters() if name != "1.0.weight"}
    quantize_layers(net, ["1.0"], "weight-only-int8", "cpu")
    assert hasattr(net.get_submodule("1.0").weight, "qdata")
    left = {name: value for name, value in net.named_parameters() if name != "1.0.weight"}
    assert left.keys() == kept.keys()
    for name, value in left.items():
        assert type(value) is nn.Parameter
        assert torch.equal(value, kept[name])


def test_no_name_leaves_the_network_as_it_is_and_a_wrong_one_is_an_error() -> None:
    net = nn.Sequential(nn.Linear(32, 2))
    quantize_layers(net, [], "weight-only-int8", "cpu")
    assert type(net[0].weight) is nn.Parameter
    with pytest.raises(AttributeError, match="head"):
        quantize_layers(net, ["0", "head"], "weight-only-int8", "cpu")
    assert type(net[0].weight) is nn.Parameter


@pytest.mark.parametrize(
    ("scheme", "device", "config"),
    [
        ("weight-only-int8", "cpu", "Int8WeightOnlyConfig"),
        ("weight-only-int8", "cuda", "Int8WeightOnlyConfig"),
        ("weight-only-int4", "cpu", "IntxWeightOnlyConfig"),
        ("weight-only-int4", "cuda", "Int4WeightOnlyConfig"),
        ("fp8", "cuda", "Float8DynamicActivationFloat8WeightConfig"),
        ("dynamic-int8", "cuda", "Int8DynamicActivationInt8WeightConfig"),
    ],
)
def test_which_of_torchaos_ways_a_scheme_is(
    scheme: str, device: str, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with quiet_torchao():
        import torchao.quantization as tq
    asked: list[tuple[str, list[bool]]] = []
    net = nn.Sequential(nn.Linear(32, 2), nn.Linear(2, 2))

    def quantize(root: nn.Module, config: Any, *, filter_fn: Any) -> None:
        asked.append((type(config).__name__, [filter_fn(layer, "") for layer in root.children()]))

    monkeypatch.setattr(tq, "quantize_", quantize)
    quantize_layers(net, ["1"], scheme, device)
    assert asked == [(config, [False, True])]


def test_quiet_inside_and_as_before_after_an_error() -> None:
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [logger.level for logger in loggers]

    def import_that_fails() -> None:
        with quiet_torchao():
            assert not any(logger.isEnabledFor(logging.ERROR) for logger in loggers)
            warnings.warn("of its import", UserWarning, stacklevel=1)
            raise RuntimeError("inside")

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        filters = list(warnings.filters)
        with pytest.raises(RuntimeError, match="inside"):
            import_that_fails()
        assert warnings.filters == filters
        warnings.warn("afterwards", UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in seen] == ["afterwards"]
    assert [logger.level for logger in loggers] == before


def test_levels_that_the_user_chose_come_back() -> None:
    logger = logging.getLogger(LOGGERS[0])
    before = logger.level
    try:
        logger.setLevel(logging.DEBUG)
        quantize_layers(nn.Sequential(nn.Linear(32, 2)), ["0"], "weight-only-int8", "cpu")
        assert logger.level == logging.DEBUG
    finally:
        logger.setLevel(before)

"""torch's quantization, held against the formulas of its scales, and what is said where it is missing."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import lightning_speedkit.compress.torch_ao as torch_ao
from lightning_speedkit.compress.torch_ao import (
    CONVOLUTIONS,
    DYNAMIC_LAYERS,
    convert_static,
    dynamic_layer,
    dynamic_refusal,
    is_quantized,
    load_recurrent_weights,
    observe_static,
    quantization_numbers,
    quantized_engine,
    quiet,
    recurrent_weights,
    static_refusal,
    unobserved,
)
from lightning_speedkit.errors import QuantizationError


def test_a_torch_without_an_engine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert quantized_engine() == torch.backends.quantized.engine
    monkeypatch.setattr(torch.backends, "quantized", SimpleNamespace(engine="none"))
    with pytest.raises(QuantizationError, match="no quantized engine"):
        quantized_engine()


@pytest.mark.parametrize("missing", [None, ModuleNotFoundError("torch.ao")])
def test_a_torch_without_its_quantization_is_told(missing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str) -> Any:
        if isinstance(missing, Exception):
            raise missing
        return missing

    monkeypatch.setattr(torch_ao.importlib.util, "find_spec", find_spec)
    with pytest.raises(QuantizationError, match=r"torch\.ao\.quantization is gone from torch .*; use an older torch"):
        dynamic_layer(nn.Linear(2, 2))


def test_a_torch_without_a_dynamic_version_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = SimpleNamespace(quantize_dynamic=lambda holder, *_, **__: holder)
    monkeypatch.setattr(torch_ao, "_quantization", lambda _: gone)
    with pytest.raises(QuantizationError, match="has no dynamic int8 version of Linear"):
        dynamic_layer(nn.Linear(2, 2))


def test_quiet_filters_inside_and_only_there() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        before = list(warnings.filters)
        with quiet():
            warnings.warn("old", DeprecationWarning, stacklevel=1)
            warnings.warn("soon old", FutureWarning, stacklevel=1)
            warnings.warn("of the user", UserWarning, stacklevel=1)
        assert warnings.filters == before
        warnings.warn("old again", DeprecationWarning, stacklevel=1)
    assert [str(warning.message) for warning in seen] == ["of the user", "old again"]


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (nn.Linear(2, 2), None),
        (nn.Linear(2, 2, bias=False), None),
        (nn.LSTM(2, 2, 2, bidirectional=True), None),
        (nn.GRUCell(2, 2), None),
        (nn.Conv2d(1, 1, 1), "Conv2d has no dynamic int8 version"),
        (nn.RNN(2, 2), "RNN has no dynamic int8 version"),
        (type("MyLinear", (nn.Linear,), {})(2, 2), "MyLinear has no dynamic int8 version"),
        (nn.GRU(2, 2, bias=False), "GRU without bias has no int8 version"),
        (nn.LSTM(2, 4, proj_size=2), "LSTM with proj_size has no int8 version"),
        (nn.Linear(2, 0), "it has an empty weight"),
    ],
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_dynamic_refusal(layer: nn.Module, why: str | None) -> None:
    assert dynamic_refusal(layer) == why
    if why is None:
        assert is_quantized(dynamic_layer(copy.deepcopy(layer)))
        assert not is_quantized(layer)


@pytest.mark.parametrize(
    ("layer", "engine", "why"),
    [
        (nn.Linear(2, 2), "x86", None),
        (nn.Conv2d(2, 4, 3, padding_mode="reflect"), "x86", None),
        (nn.Conv3d(2, 4, 3, padding_mode="reflect"), "x86", "padding_mode='reflect' has no int8 version"),
        (nn.Conv1d(2, 4, 3, padding_mode="circular"), "x86", "padding_mode='circular' has no int8 version"),
        (nn.Conv1d(2, 4, 2, padding="same"), "x86", "padding='same' that is larger on one side has no int8 version"),
        (nn.ConvTranspose2d(4, 4, 3), "x86", None),
        (nn.ConvTranspose2d(2, 4, 3), "fbgemm", None),
        (nn.ConvTranspose2d(2, 4, 3), "x86", "the engine 'x86' computes a transposed convolution wrongly"),
        (nn.ConvTranspose2d(4, 2, 3), "onednn", "the engine 'onednn' computes a transposed convolution wrongly"),
        (nn.Conv3d(2, 2, 3), "qnnpack", "the engine 'qnnpack' cannot save a convolution of three dimensions"),
        (nn.Conv2d(2, 2, 3), "qnnpack", None),
    ],
)
def test_static_refusal(layer: nn.Module, engine: str, why: str | None) -> None:
    told = static_refusal(layer, engine)
    assert told is None if why is None else str(told).startswith(why)


def test_observers_are_silent_until_they_see_a_value() -> None:
    prepared = observe_static(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sigmoid()).eval(), engine=quantized_engine())
    # of the input and of the convolution; the range of a sigmoid is known
    assert len(unobserved(prepared)) == 2
    prepared(torch.rand(1, 1, 5, 5))
    assert unobserved(prepared) == []


def test_skipped_layers_get_no_observer_and_stay_in_float() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3)).eval()
    prepared = observe_static(copy.deepcopy(net), engine=quantized_engine(), skip=["1"])
    prepared(torch.rand(1, 1, 8, 8))
    graph = convert_static(prepared)
    assert is_quantized(graph.get_submodule("0"))
    assert type(graph.get_submodule("1")) is nn.Conv2d


def test_statistics_of_an_instance_norm_cannot_be_kept_in_int8() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.InstanceNorm2d(2, track_running_stats=True)).eval()
    with pytest.raises(QuantizationError, match="would not look at the running statistics of '1'"):
        observe_static(net, engine=quantized_engine())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_recurrent_weights_are_the_float_ones_to_half_a_step_and_go_into_another_layer(kind: type[nn.Module]) -> None:
    layer, x = kind(6, 5), torch.randn(4, 6) if "Cell" in kind.__name__ else torch.randn(4, 2, 6)
    int8 = dynamic_layer(copy.deepcopy(layer))
    weights = recurrent_weights(int8)
    assert weights is not None
    names = dict(layer.named_parameters())
    assert set(weights) == set(names)
    for name, value in weights.items():
        expected = names[name]
        if value.is_quantized:
            scale = float(expected.detach().abs().max()) / 127.5
            assert float((value.dequantize() - expected.detach()).abs().max()) <= scale * 0.5001
        else:
            torch.testing.assert_close(value, expected.detach(), rtol=0, atol=0)
    other = dynamic_layer(kind(6, 5))
    load_recurrent_weights(other, weights)
    first = lambda out: out[0] if isinstance(out, tuple) else out  # noqa: E731
    torch.testing.assert_close(first(other(x)), first(int8(x)), rtol=0, atol=0)
    assert recurrent_weights(layer) is None
    assert recurrent_weights(dynamic_layer(nn.Linear(2, 2))) is None


def test_numbers_are_those_of_int8_layers_alone() -> None:
    prepared = observe_static(nn.Sequential(nn.Conv2d(1, 2, 3), nn.ELU()).eval(), engine=quantized_engine())
    prepared(torch.randn(8, 1, 5, 5))
    graph = convert_static(prepared)
    numbers = quantization_numbers(graph.get_submodule("1"))
    assert set(numbers) == {"scale", "zero_point"}
    assert numbers["scale"] != 1.0
    upsample = nn.Upsample(scale_factor=2)
    upsample.scale = 3.0  # type: ignore[assignment]
    assert quantization_numbers(upsample) == {}


def test_kinds_of_layers_are_disjoint() -> None:
    assert not set(CONVOLUTIONS) & set(DYNAMIC_LAYERS)


def test_torch_keeps_no_model_alive() -> None:
    kept = []
    for converted in (False, True):
        model = observe_static(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), engine=quantized_engine())
        model(torch.randn(4, 8))
        if converted:
            model = convert_static(model)
        kept.append(weakref.ref(model))
        del model
    gc.collect()
    assert [reference() for reference in kept] == [None, None]

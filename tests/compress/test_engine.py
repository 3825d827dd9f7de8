"""Which engines there are, in which order they are tried, and what each says when it cannot work here."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest
import torch

from lightning_speedkit.compress.engine import ENGINES, FLOAT32, SCHEMES, engine_named, engines_for, float_engine


def _names(*arguments: str) -> list[str]:
    return [engine.name for engine in engines_for(*arguments)]


def test_order_on_a_cpu_and_on_cuda() -> None:
    fast = ["onnxruntime-static", "onnxruntime-dynamic", "torch-ao-static", "torch-ao-dynamic"]
    assert _names("auto", "cpu") == fast
    assert _names("auto", "cpu", "size") == [*fast, "torchao-weight-int8", "torchao-weight-int4"]
    assert _names("auto", "cuda")[0] == "torchao-dynamic-int8"
    assert "torchao-fp8" in _names("auto", "cuda")
    assert _names("static-int8", "cpu") == ["onnxruntime-static", "torch-ao-static"]
    assert FLOAT32 not in SCHEMES


def test_a_scheme_without_an_engine_for_the_device_says_why() -> None:
    (engine,) = engines_for("fp8", "cpu")
    assert engine.missing("cpu") == "torchao-fp8 is for cuda, not for cpu"


def test_every_name_is_found_again_and_no_other_is_offered() -> None:
    assert [engine_named(engine.name) for engine in ENGINES] == list(ENGINES)
    for wrong in ("fx_static", "dynamic"):
        with pytest.raises(ValueError, match="backend must be one of") as caught:
            engine_named(wrong)
        named = set(re.findall(r"'([^']*)'", str(caught.value).partition(", got")[0]))
        assert named == {engine.name for engine in ENGINES}
    with pytest.raises(ValueError, match="Did you mean 'onnxruntime-static'"):
        engine_named("onnxruntime_static")
    with pytest.raises(ValueError, match="scheme must be one of"):
        engines_for("int8")


def test_float32_beside() -> None:
    beside = {engine.name: float_engine(engine) for engine in ENGINES}
    assert beside["onnxruntime-dynamic"] == engine_named("onnxruntime-float32")
    assert beside["torch-ao-static"] is None
    assert beside["torchao-weight-int8"] is None


def test_a_missing_library_is_told_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    torchao_engine = importlib.import_module("lightning_speedkit.compress.torchao_engine")

    def without(name: str, *rest: Any) -> Any:
        return None if name in ("onnxruntime", "torchao", "torch.ao.quantization.quantize_fx") else real(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    monkeypatch.setattr(torchao_engine, "find_spec", without)
    said = {engine.name: engine.missing("cpu") for engine in ENGINES if "cpu" in engine.devices}
    assert all(said.values())
    assert "needs onnxruntime, which is not installed: pip install 'lightning-speedkit[quant]'" in str(
        said["onnxruntime-static"]
    )
    assert "needs torchao" in str(said["torchao-weight-int8"])
    assert "has no torch.ao.quantization any more: pip install 'lightning-speedkit[quant]'" in str(
        said["torch-ao-dynamic"]
    )


@pytest.mark.parametrize(
    ("name", "available", "capability", "said"),
    [
        ("torchao-fp8", False, (9, 0), "no CUDA device"),
        ("torchao-fp8", True, (8, 6), "capability 8.9 or higher, and this one has 8.6"),
        ("torchao-fp8", True, (8, 9), None),
        ("torchao-dynamic-int8", True, (7, 5), None),
    ],
)
def test_what_cuda_needs(
    name: str, available: bool, capability: tuple[int, int], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    found = engine_named(name).missing("cuda")
    assert (found is None) if said is None else (said in str(found))

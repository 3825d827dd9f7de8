"""Each switch of torch's float32 arithmetic goes back to exactly what was found, by old names and by new ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lightning_speedkit.precision.numeric_switches import Switch, autotune_switch, convolution_switch, matmul_switch

_OPERATIONS = [
    *(("generic", "all"), ("cuda", "all"), ("mkldnn", "all")),
    *((backend, operation) for backend in ("cuda", "mkldnn") for operation in ("matmul", "conv", "rnn")),
]
_core: Any = torch._C


def _old(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except RuntimeError:
        return "raises"


def everything() -> dict[str, Any]:
    """All that torch says of these switches, by both names."""
    values = {
        f"{backend}.{operation}": _core._get_fp32_precision_getter(backend, operation)
        for backend, operation in _OPERATIONS
    }
    values["matmul, old name"] = _old(torch.get_float32_matmul_precision)
    values["cuBLAS, old name"] = _old(lambda: torch.backends.cuda.matmul.allow_tf32)
    values["cuDNN, old name"] = _old(lambda: torch.backends.cudnn.allow_tf32)
    values["benchmark"] = torch.backends.cudnn.benchmark
    return values


@pytest.fixture(autouse=True)
def _as_found() -> Iterator[None]:
    found = everything()
    yield
    torch.backends.cudnn.benchmark = found["benchmark"]
    _core._set_fp32_precision_setter("generic", "all", "none")
    for backend, operation in _OPERATIONS[1:]:
        _core._set_fp32_precision_setter(backend, operation, "none")
    torch.set_float32_matmul_precision(found["matmul, old name"])
    torch.backends.cudnn.allow_tf32 = found["cuDNN, old name"]
    for backend, operation in _OPERATIONS:
        _core._set_fp32_precision_setter(backend, operation, found[f"{backend}.{operation}"])
    assert everything() == found


def _fresh() -> None:
    pass


def _old_names() -> None:
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.allow_tf32 = False


def _new_names() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cudnn.conv.fp32_precision = "ieee"


def _a_parent() -> None:
    torch.backends.fp32_precision = "tf32"


SWITCHES: dict[str, Callable[[], Switch]] = {
    **{f"matmul={level}": lambda level=level: matmul_switch(level) for level in ("highest", "high", "medium")},
    "tf32": lambda: convolution_switch(True),
    "ieee": lambda: convolution_switch(False),
    "autotune": lambda: autotune_switch(True),
    "no autotune": lambda: autotune_switch(False),
}


@pytest.mark.parametrize("before", [_fresh, _old_names, _new_names, _a_parent])
@pytest.mark.parametrize("name", SWITCHES)
def test_what_was_found_is_put_back(name: str, before: Callable[[], None]) -> None:
    before()
    found = everything()
    assert SWITCHES[name]().restore()
    assert everything() == found


def test_matmul_is_set_by_the_old_name() -> None:
    for level, cuda in (("high", "tf32"), ("medium", "tf32"), ("highest", "ieee")):
        switch = matmul_switch(level)
        assert torch.get_float32_matmul_precision() == level
        assert (torch.backends.cuda.matmul.fp32_precision == "tf32") is (cuda == "tf32")
        assert torch.backends.cuda.matmul.allow_tf32 is (cuda == "tf32")
        assert switch.restore()


def test_matmul_is_set_by_the_new_name_where_only_that_can_be_read() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with pytest.raises(RuntimeError, match="mix"):
        torch.get_float32_matmul_precision()
    switch = matmul_switch("highest")
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    assert switch.restore()
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


def test_convolutions_are_set_for_both_names() -> None:
    switch = convolution_switch(False)
    assert torch.backends.cudnn.allow_tf32 is False
    assert torch.backends.cudnn.conv.fp32_precision != "tf32"
    assert switch.restore()
    assert torch.backends.cudnn.allow_tf32 is True


def test_what_something_else_has_set_is_left() -> None:
    switch = matmul_switch("high")
    torch.set_float32_matmul_precision("medium")
    assert not switch.restore()
    assert torch.get_float32_matmul_precision() == "medium"
    torch.set_float32_matmul_precision("highest")

    switch = autotune_switch(True)
    torch.backends.cudnn.benchmark = False
    assert not switch.restore()
    assert torch.backends.cudnn.benchmark is False


def test_what_inherits_goes_on_to_inherit() -> None:
    torch.backends.fp32_precision = "tf32"
    switch = convolution_switch(False)
    assert switch.restore()
    torch.backends.mkldnn.set_flags(_fp32_precision="ieee")
    assert torch.backends.cudnn.conv.fp32_precision == "tf32"


def test_no_advice_of_torch_reaches_the_user(recwarn: pytest.WarningsRecorder) -> None:
    for make in SWITCHES.values():
        make().restore()
    assert [str(warning.message) for warning in recwarn] == []

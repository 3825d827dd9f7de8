"""What a user may write, and what the error says."""

from __future__ import annotations

import pytest
import torch

from lightning_speedkit.optimize.optimizer_options import (
    checked_name,
    checked_number,
    checked_options,
    defaults_of,
    unknown_name,
)

_DEFAULTS = defaults_of(torch.optim.AdamW)


def test_the_nearest_name_is_suggested_and_all_are_listed() -> None:
    assert "Did you mean 'warmup-cosine'? Known: linear, warmup-cosine" in str(
        unknown_name("schedule", "Warmup_Cosine", ["linear", "warmup-cosine"])
    )
    assert "Did you mean 'sgd-momentum'" in str(unknown_name("optimizer", "SGD", ["adam", "sgd-momentum"]))
    for far, known in (("xyz", "linear"), ("lion", "muon")):
        assert "Did you mean" not in str(unknown_name("schedule", far, [known]))


def test_options_are_copied_and_checked() -> None:
    mine = {"betas": [0.8, 0.9]}
    assert checked_options("adam", mine, _DEFAULTS) == {"betas": (0.8, 0.9)}
    assert mine == {"betas": [0.8, 0.9]}
    assert checked_options("adam", None, {}) == {}
    kept = {"fused": None, "foreach": True, "eps": 1, "betas": (torch.tensor(0.9), torch.tensor(0.99))}
    assert checked_options("adam", kept, _DEFAULTS) == kept
    eps = {"eps": [None, 0.01]}
    assert checked_options("adafactor", eps, defaults_of(torch.optim.Adafactor)) == {"eps": (None, 0.01)}
    assert checked_options("plateau", {"min_lr": [0.1, 0.2]}, {"min_lr": 0}) == {"min_lr": (0.1, 0.2)}
    with pytest.raises(ValueError, match=r"no option of adam 'beta'. Did you mean 'betas'\?"):
        checked_options("adam", {"beta": 1}, _DEFAULTS)
    with pytest.raises(TypeError, match="must be a mapping"):
        checked_options("adam", ["betas"], _DEFAULTS)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eps": "1e-8"}, r"eps='1e-8' must be a number; got str. Write it without quotes, .*: 1.0e-08\."),
        ({"betas": 0.9}, r"betas=0.9 must be 2 numbers, such as \[0.9, 0.999\]"),
        ({"betas": ["0.9", 0.99]}, r"betas\[0\]='0.9' must be a number; got str. .*: 0.9\."),
        ({"betas": [None, 0.99]}, r"betas\[0\]=None must be a number; got NoneType\.$"),
        ({"amsgrad": "false"}, "amsgrad='false' must be true or false; got str"),
        ({"fused": "yes"}, "fused='yes' must be true or false; got str"),
        ({"amsgrad": 1.5}, "amsgrad=1.5 must be true or false"),
    ],
)
def test_a_value_of_another_kind_than_the_default_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        checked_options("adamw", options, _DEFAULTS)


def test_lengths_and_texts_are_checked() -> None:
    with pytest.raises(ValueError, match=r"betas=\[0.9\] must be 2 numbers"):
        checked_options("adamw", {"betas": [0.9]}, _DEFAULTS)
    with pytest.raises(TypeError, match="mode=1 must be text, such as 'min'; got int"):
        checked_options("plateau", {"mode": 1}, {"mode": "min"})
    with pytest.raises(TypeError, match="name of the optimizer is text, one of adam, adamw; got list"):
        checked_name("optimizer", ["adam"], ["adam", "adamw"])


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), float("inf")])
def test_a_number_out_of_range_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="must be 0 or more and at most 1"):
        checked_number("share", value, 0, 1)


def test_what_is_no_number_is_refused() -> None:
    assert checked_number("share", 0, 0) == 0.0
    with pytest.raises(ValueError, match="must be above 0"):
        checked_number("share", 0, 0, above=True)
    for value in (True, "one", None):
        with pytest.raises(TypeError, match=rf"must be a number; got {type(value).__name__}\.$"):
            checked_number("share", value, 0)
    with pytest.raises(TypeError, match=r"steps='12' must be a number; got str. Write it without quotes: 12\.$"):
        checked_number("steps", "12", 0)
    with pytest.raises(TypeError, match=r"lr='3e-4' .* in YAML with a point: 0.0003\."):
        checked_number("lr", "3e-4", 0)

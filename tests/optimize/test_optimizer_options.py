"""What a user may write, and what the error says."""

from __future__ import annotations

import pytest

from lightning_speedkit.optimize.optimizer_options import checked_number, checked_options, unknown_name


def test_the_nearest_name_is_suggested_and_all_are_listed() -> None:
    assert "Did you mean 'warmup-cosine'? Known: linear, warmup-cosine" in str(
        unknown_name("schedule", "Warmup_Cosine", ["linear", "warmup-cosine"])
    )
    assert "Did you mean" not in str(unknown_name("schedule", "xyz", ["linear"]))


def test_options_are_copied_and_checked() -> None:
    mine = {"betas": [0.8, 0.9]}
    assert checked_options("adam", mine, ["betas"]) == {"betas": (0.8, 0.9)}
    assert mine == {"betas": [0.8, 0.9]}
    assert checked_options("adam", None, []) == {}
    with pytest.raises(ValueError, match=r"no option of adam 'beta'. Did you mean 'betas'\?"):
        checked_options("adam", {"beta": 1}, ["betas", "eps"])
    with pytest.raises(TypeError, match="must be a mapping"):
        checked_options("adam", ["betas"], ["betas"])  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), float("inf")])
def test_a_number_out_of_range_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="must be 0 or more and at most 1"):
        checked_number("share", value, 0, 1)


def test_what_is_no_number_is_refused() -> None:
    assert checked_number("share", 0, 0) == 0.0
    with pytest.raises(ValueError, match="must be above 0"):
        checked_number("share", 0, 0, above=True)
    for value in (True, "1", None):
        with pytest.raises(TypeError, match="must be a number"):
            checked_number("share", value, 0)

"""The tree of errors: what is drawn is what there is, and each can be caught by the built-in it stands for."""

from __future__ import annotations

import inspect
import re

import pytest

from lightning_speedkit import errors


def test_the_drawn_tree_is_the_real_one() -> None:
    drawn = dict(re.findall(r"[├└]── (\w+) *(?:\((\w+)\))?", errors.__doc__ or ""))
    real = {name: cls for name, cls in inspect.getmembers(errors, inspect.isclass) if name != "SpeedkitError"}
    functions = {"did_you_mean", "nearest_names"}
    assert set(drawn) == set(real) == set(errors.__all__) - {"SpeedkitError"} - functions
    for name, cls in real.items():
        assert issubclass(cls, errors.SpeedkitError)
        built_in = next((b.__name__ for b in cls.__bases__ if not issubclass(b, errors.SpeedkitError)), "")
        assert drawn[name] == built_in, name
        assert cls.__doc__


def test_a_missing_extra_says_what_to_type() -> None:
    error = errors.MissingExtraError("the report", extra="report", library="jinja2")
    assert "pip install 'lightning-speedkit[report]'" in str(error)
    assert isinstance(error, ImportError)


@pytest.mark.parametrize(
    ("library", "said"),
    [
        ("a", "needs a, which is not installed: pip"),
        ("a and b", "needs a and b, which are not installed: pip"),
        ("a or b", "needs a or b, neither of which is installed: pip"),
        ("a, b or c", "needs a, b or c, none of which is installed: pip"),
    ],
)
def test_several_libraries_are_spoken_of_as_several(library: str, said: str) -> None:
    assert said in str(errors.MissingExtraError("x", extra="y", library=library))


@pytest.mark.parametrize(
    ("wrong", "known", "near"),
    [
        ("Warmup_Cosine", ["linear", "warmup-cosine"], ["warmup-cosine"]),
        ("encoder.layer.1", ["encoder.layers.0", "encoder.layers.1"], ["encoder.layers.1", "encoder.layers.0"]),
        ("sgd", ["adam", "sgd-momentum"], ["sgd-momentum"]),  # has it in it
        ("batchsize", ["batch_size", "limit"], ["batch_size"]),
        ("b", ["a", "a", "c"], []),
        ("aa", ["aa", "aa"], ["aa"]),
        (3, [1, 2], []),
        ("", ["a"], []),
    ],
)
def test_the_names_that_are_spelt_alike(wrong: object, known: list[object], near: list[str]) -> None:
    assert errors.nearest_names(wrong, known) == near
    hint = errors.did_you_mean(wrong, known)
    assert hint == (f" Did you mean {' or '.join(map(repr, near))}?" if near else "")

"""The tree of errors: what is drawn is what there is, and each can be caught by the built-in it stands for."""

from __future__ import annotations

import inspect
import re

from lightning_speedkit import errors


def test_the_drawn_tree_is_the_real_one() -> None:
    drawn = dict(re.findall(r"[├└]── (\w+) *(?:\((\w+)\))?", errors.__doc__ or ""))
    real = {name: cls for name, cls in inspect.getmembers(errors, inspect.isclass) if name != "SpeedkitError"}
    assert set(drawn) == set(real) == set(errors.__all__) - {"SpeedkitError"}
    for name, cls in real.items():
        assert issubclass(cls, errors.SpeedkitError)
        built_in = next((b.__name__ for b in cls.__bases__ if not issubclass(b, errors.SpeedkitError)), "")
        assert drawn[name] == built_in, name
        assert cls.__doc__


def test_a_missing_extra_says_what_to_type() -> None:
    error = errors.MissingExtraError("the report", extra="report", library="jinja2")
    assert "pip install 'lightning-speedkit[report]'" in str(error)
    assert isinstance(error, ImportError)

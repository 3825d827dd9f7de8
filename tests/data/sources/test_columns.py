"""The grammar of --columns."""

from __future__ import annotations

import pytest

from lightning_speedkit.data.sources.columns import chosen, parse_columns
from lightning_speedkit.errors import SourceError


@pytest.mark.parametrize(
    ("given", "parsed"),
    [
        (None, None),
        ("a", {"a": ""}),
        ("b, a:int", {"b": "", "a": "int"}),
        (["a:b", "x:y:str"], {"a:b": "", "x:y": "str"}),
        ("image/encoded,label:array", {"image/encoded": "", "label": "array"}),
        ("jpg;png,cls", {"jpg;png": "", "cls": ""}),
    ],
)
def test_names_and_types(given: object, parsed: object) -> None:
    assert parse_columns(given) == parsed  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["", "a,,b", "a,a", "a,a:int", [], ":int"])
def test_empty_and_repeated_names_are_refused(given: object) -> None:
    with pytest.raises(ValueError, match="columns must"):
        parse_columns(given)  # type: ignore[arg-type]


def test_a_column_that_is_not_there_is_named_with_the_nearest() -> None:
    assert chosen(None, ["a", "b"], "x") == {"a": "", "b": ""}
    assert list(chosen({"b": "", "a": ""}, ["a", "b"], "x")) == ["b", "a"]
    with pytest.raises(SourceError, match=r"t\.csv has no 'lable'\. Did you mean 'label'\? It has 'label', 'x'\."):
        chosen({"lable": ""}, ["label", "x"], "t.csv")
    with pytest.raises(ValueError, match=r"a:int, but for t a type must be one of: str"):
        chosen({"a": "int"}, ["a"], "t", types=("str",))

"""module:function, and what such a name may be."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lightning_speedkit.data.sources.python_function import PythonFunction, is_python_name
from lightning_speedkit.errors import ImageError, SourceError


class MapStyle:
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[int, str]:
        return index, str(index)  # never an IndexError


class Streaming:
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def __call__(self) -> None:
        raise AssertionError("an iterable is not called")


def failing() -> Iterator[int]:
    yield 1
    raise KeyError("lost")


def own_error() -> None:
    raise ImageError("as it is")


@pytest.fixture(autouse=True)
def _module(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("made_up")
    module.generator = lambda: ((i, i * i) for i in range(4))
    module.sized = lambda: [1, 2]
    module.MapStyle, module.streaming, module.failing, module.own_error = MapStyle, Streaming(), failing, own_error
    module.nothing = lambda: None
    module.mapping = lambda: {"a": 1}
    module.text = "abc"
    module.inner = ModuleType("inner")
    module.inner.samples = [("x", 1)]
    monkeypatch.setitem(sys.modules, "made_up", module)


@pytest.mark.parametrize(
    ("name", "samples"),
    [
        ("generator", [(0, 0), (1, 1), (2, 4), (3, 9)]),
        ("sized", [1, 2]),
        ("MapStyle", [(0, "0"), (1, "1"), (2, "2")]),
        ("streaming", [0, 1, 2]),
        ("inner.samples", [("x", 1)]),
    ],
)
def test_what_gives_samples_is_read_more_than_once(name: str, samples: list[Any]) -> None:
    source = PythonFunction(f"made_up:{name}")
    assert [list(source), list(source)] == [samples, samples]
    if name in ("generator", "streaming"):
        with pytest.raises(TypeError):
            len(source)
    else:
        assert len(source) == len(samples)
    assert [item.place for item in source.items()][:1] == [f"made_up:{name} sample 0"]


@pytest.mark.parametrize("name", ["nothing", "mapping", "text"])
def test_what_gives_none_is_refused(name: str) -> None:
    with pytest.raises(SourceError, match=f"made_up:{name} gave a .*: it must give an iterable"):
        list(PythonFunction(f"made_up:{name}"))


def test_faults_of_the_function_carry_its_name() -> None:
    assert next(PythonFunction("made_up:failing").items()).read() == 1
    with pytest.raises(SourceError, match=r"made_up:failing raised KeyError while it gave samples: 'lost'"):
        list(PythonFunction("made_up:failing"))
    with pytest.raises(ImageError, match="as it is"):
        list(PythonFunction("made_up:own_error"))
    with pytest.raises(SourceError, match="made_up has no 'missing'"):
        PythonFunction("made_up:missing")
    with pytest.raises(SourceError, match=r"made_up has no 'nothign'\. Did you mean 'nothing'\?"):
        PythonFunction("made_up:nothign")
    with pytest.raises(SourceError, match="no module 'no_such_module' in the current folder"):
        PythonFunction("no_such_module:x")
    Path("broken_module.py").write_text("1 / 0")
    sys.path.insert(0, str(Path.cwd()))
    try:
        with pytest.raises(SourceError, match="importing broken_module raised ZeroDivisionError"):
            PythonFunction("broken_module:x")
    finally:
        sys.path.pop(0)


def test_names_are_told_from_paths() -> None:
    assert [name for name in ("a:b", "a.b:c.d", "_x1:y") if not is_python_name(name)] == []
    assert [
        name for name in ("a", "a:", ":b", "a/b:c", "C:/x", "a:b:c", "1a:b", "a..b:c") if is_python_name(name)
    ] == []
    with pytest.raises(SourceError, match="not of the form module:function"):
        PythonFunction("a/b:c")

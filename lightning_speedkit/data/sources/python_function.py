"""``module:function``: samples that a function of the user yields.

The function is called without arguments for each pass, and returns an iterable of samples or a map-style dataset. It is
read by one thread, in order. A function whose own work is slow can be spread over processes by itself: let it return a
``torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=8)``.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_speedkit.data.argument_checks import a_type
from lightning_speedkit.data.sources.source import Item, Source, held_item
from lightning_speedkit.data.store.lmdb_pack import iterate_samples
from lightning_speedkit.errors import SourceError, SpeedkitError

__all__ = ["PythonFunction", "find_python_name", "is_python_name"]

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def is_python_name(text: str) -> bool:
    """Whether a text has the form ``module:function``.

    >>> is_python_name("my.data:training"), is_python_name("my/data.csv")
    (True, False)
    """
    return _NAME.fullmatch(text) is not None


def find_python_name(name: str) -> Any:
    """What ``module:function`` names; the module is imported.

    Raises:
        SourceError: no such module or name, or importing it fails; it names the nearest.

    >>> find_python_name("math:sqrt")(9.0)
    3.0
    """
    module_name, _, attribute = name.partition(":")
    if not is_python_name(name):
        raise SourceError(f"{name!r} is not of the form module:function, such as my_data:training_samples.")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise SourceError(
            f"{name}: there is no module {error.name!r} in the current folder ({Path.cwd()}) or on the path of Python."
        ) from error
    except Exception as error:
        raise SourceError(f"{name}: importing {module_name} raised {type(error).__name__}: {error}.") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise SourceError(f"{name}: {module_name} has no {attribute!r}.{hint}")
        found = getattr(found, part)
    return found


class PythonFunction(Source):
    """The samples of ``module:function``, or of an iterable or dataset of that name.

    Raises:
        SourceError: no such module or name, or what is found there gives no samples.
    """

    format = "python"

    def __init__(self, name: str) -> None:
        self.name = name
        self._found = find_python_name(name)
        self._samples: Any = None

    def __len__(self) -> int:
        if self._samples is None:
            self._samples = self._made()
        return len(self._samples)

    def items(self) -> Iterator[Item]:
        """One item per sample."""
        samples, self._samples = (self._made() if self._samples is None else self._samples), None
        try:
            for number, sample in enumerate(iterate_samples(samples)[0]):
                yield held_item(f"{self.name} sample {number}", sample)
        except (SpeedkitError, MemoryError):
            raise
        except Exception as error:
            raise SourceError(f"{self.name} raised {type(error).__name__} while it gave samples: {error}.") from error

    def _made(self) -> Any:
        try:
            made = self._found() if callable(self._found) and not _gives_samples(self._found) else self._found
        except SpeedkitError:
            raise
        except Exception as error:
            raise SourceError(f"{self.name} raised {type(error).__name__}: {error}.") from error
        if not _gives_samples(made):
            raise SourceError(
                f"{self.name} gave {a_type(made)}: it must give an iterable of samples, or a dataset with "
                f"__len__ and __getitem__."
            )
        return made


def _gives_samples(value: Any) -> bool:
    if isinstance(value, type | str | bytes | Mapping):
        return False
    kind = type(value)
    return isinstance(value, Iterable) or (hasattr(kind, "__getitem__") and hasattr(kind, "__len__"))

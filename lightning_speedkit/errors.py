"""Every error that the kit raises for a fault of a run or of its data, and the hint for a name that is spelt wrongly.

One wrong argument is a ``ValueError`` or ``TypeError``; a combination that the Trainer cannot run is Lightning's
``MisconfigurationException``. Everything else is a :class:`SpeedkitError`::

    SpeedkitError
    ├── UnknownPresetError      (ValueError)         no preset of that name
    ├── PresetConflictError     (ValueError)         two presets set one thing differently
    ├── HardwareNeedError       (RuntimeError)       a preset needs hardware that this machine does not have
    ├── MissingExtraError       (ImportError)        an optional library is not installed
    ├── FactsError              (ValueError)         a record of a run that this version cannot read
    ├── QuantizationError       (RuntimeError)       a model could not be quantized or checked
    ├── DivergenceError         (RuntimeError)       a guard had to act more often than allowed
    ├── LoaderError             (RuntimeError)       a sample, a transform or a worker of a loader failed
    ├── ImageError              (ValueError)         bytes that are not the picture they should be
    ├── SourceError             (ValueError)         a source of samples that cannot be read
    ├── StagingError            (OSError)            a store could not be brought to the local disk
    └── StoreError
        ├── StoreNotFoundError  (FileNotFoundError)  nothing at that path
        ├── StoreCorruptError                        empty, truncated, or a checksum that does not match
        ├── StoreVersionError                        written by a newer format than this version reads
        ├── StoreWriteError     (OSError)            the store could not be written; the old one is untouched
        ├── SampleMismatchError (ValueError)         a sample whose structure differs from the first
        └── EmptyStoreError     (ValueError)         there were no samples to write
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "DivergenceError",
    "EmptyStoreError",
    "FactsError",
    "HardwareNeedError",
    "ImageError",
    "LoaderError",
    "MissingExtraError",
    "PresetConflictError",
    "QuantizationError",
    "SampleMismatchError",
    "SourceError",
    "SpeedkitError",
    "StagingError",
    "StoreCorruptError",
    "StoreError",
    "StoreNotFoundError",
    "StoreVersionError",
    "StoreWriteError",
    "UnknownPresetError",
    "did_you_mean",
    "nearest_names",
]


class SpeedkitError(Exception):
    """The root of the kit's errors."""


class DivergenceError(SpeedkitError, RuntimeError):
    """A run does not recover: a guard had to act more often than it was allowed to."""


class UnknownPresetError(SpeedkitError, ValueError):
    """No preset has that name; the message suggests the nearest."""


class PresetConflictError(SpeedkitError, ValueError):
    """Two presets set the same thing to different values, or one sets it twice."""


class HardwareNeedError(SpeedkitError, RuntimeError):
    """A preset needs hardware that this machine does not have; if libraries are missing too, they are named."""


class MissingExtraError(SpeedkitError, ImportError):
    """An optional library is missing; the message has the pip line that installs it.

    ``library`` may name several, as "a and b" or as "a or b"; ``install`` is another command than that of the extra.

    >>> str(MissingExtraError("the report", extra="report", library="jinja2"))
    "the report needs jinja2, which is not installed: pip install 'lightning-speedkit[report]'"
    >>> str(MissingExtraError("a PNG", extra="images", library="OpenCV or Pillow")).partition(": ")[0]
    'a PNG needs OpenCV or Pillow, neither of which is installed'
    """

    def __init__(self, purpose: str, *, extra: str, library: str, install: str = "") -> None:
        which = "which is not installed"
        if " or " in library:
            which = f"{'none' if ', ' in library else 'neither'} of which is installed"
        elif " and " in library:
            which = "which are not installed"
        install = install or f"pip install 'lightning-speedkit[{extra}]'"
        super().__init__(f"{purpose} needs {library}, {which}: {install}")


class FactsError(SpeedkitError, ValueError):
    """A record of a run is damaged, or was written by a newer version of the kit."""


class QuantizationError(SpeedkitError, RuntimeError):
    """A model could not be quantized, or the quantized model failed its self-check."""


class LoaderError(SpeedkitError, RuntimeError):
    """A loader could not make a batch: a sample, a transform, a collate function or a worker failed."""


class ImageError(SpeedkitError, ValueError):
    """Bytes could not be decoded as the picture that a field says they are."""


class SourceError(SpeedkitError, ValueError):
    """A source of samples cannot be read, or is not what it was taken for."""


class StagingError(SpeedkitError, OSError):
    """A store could not be brought to the local disk."""


class StoreError(SpeedkitError):
    """Something is wrong with a store of samples on disk."""


class StoreNotFoundError(StoreError, FileNotFoundError):
    """There is no store at that path."""


class StoreCorruptError(StoreError):
    """The store is empty, shorter than it was written, or one of its checksums does not match."""


class StoreVersionError(StoreError):
    """The store was written in a newer format than this version of the kit can read."""


class StoreWriteError(StoreError, OSError):
    """The store could not be written; what was at the path before is untouched."""


class SampleMismatchError(StoreError, ValueError):
    """A sample differs in structure or type from the first one of its store."""


class EmptyStoreError(StoreError, ValueError):
    """There were no samples to write."""


def nearest_names(wrong: object, known: Iterable[object], *, most: int = 2, cutoff: float = 0.6) -> list[str]:
    """Of the known names those that are spelt most like the wrong one, the nearest first; empty if none is.

    Upper and lower case, and ``_`` and ``-``, count as the same. A second one is given only if it is about as near. If
    none is near, one that has the wrong name in it.

    >>> nearest_names("adamv", ["adamw", "adam", "muon"]), nearest_names("ADAM_W", ["adam", "adamw", "muon"])
    (['adam', 'adamw'], ['adamw'])
    >>> nearest_names("cosine", ["linear", "warmup-cosine"]), nearest_names("lion", ["adamw"])
    (['warmup-cosine'], [])
    """
    from difflib import SequenceMatcher  # not while the package is imported

    asked = _plainly(wrong)
    names = list(map(str, known))
    likeness = {name: SequenceMatcher(None, _plainly(name), asked).ratio() for name in names}
    near = sorted((name for name in names if likeness[name] >= cutoff), key=lambda name: -likeness[name])
    near = [name for name in dict.fromkeys(near) if likeness[near[0]] - likeness[name] <= 0.1]
    return near[:most] or [name for name in names if asked and asked in _plainly(name)][:1]


def did_you_mean(wrong: object, known: Iterable[object], *, most: int = 2, cutoff: float = 0.6) -> str:
    """The question whether a name was meant that is spelt alike, with a space before it; empty if there is none.

    >>> did_you_mean("adamv", ["adamw", "muon"])
    " Did you mean 'adamw'?"
    """
    near = nearest_names(wrong, known, most=most, cutoff=cutoff)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def _plainly(name: object) -> str:
    return str(name).lower().replace("_", "-")

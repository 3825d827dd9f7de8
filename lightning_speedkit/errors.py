"""Every error that the kit raises for a fault of a run or of its data.

One wrong argument is a ``ValueError`` or ``TypeError``; a combination that the Trainer cannot run is Lightning's
``MisconfigurationException``. Everything else is a :class:`SpeedkitError`::

    SpeedkitError
    ├── UnknownPresetError      (ValueError)         no preset of that name
    ├── PresetConflictError     (ValueError)         two presets set one thing differently
    ├── HardwareNeedError       (RuntimeError)       a preset needs what this machine does not have
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
]


class SpeedkitError(Exception):
    """The root of the kit's errors."""


class DivergenceError(SpeedkitError, RuntimeError):
    """A run does not recover: a guard had to act more often than it was allowed to."""


class UnknownPresetError(SpeedkitError, ValueError):
    """No preset has that name; the message suggests the nearest."""


class PresetConflictError(SpeedkitError, ValueError):
    """Two presets set the same thing to different values."""


class HardwareNeedError(SpeedkitError, RuntimeError):
    """A preset needs hardware or software that this machine does not have."""


class MissingExtraError(SpeedkitError, ImportError):
    """An optional library is missing; the message has the pip line that installs it.

    >>> str(MissingExtraError("the report", extra="report", library="jinja2"))
    "the report needs jinja2, which is not installed: pip install 'lightning-speedkit[report]'"
    """

    def __init__(self, purpose: str, *, extra: str, library: str) -> None:
        super().__init__(
            f"{purpose} needs {library}, which is not installed: pip install 'lightning-speedkit[{extra}]'"
        )


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

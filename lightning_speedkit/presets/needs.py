"""Whether this machine has what a preset needs, in words that a person can act on."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lightning_speedkit.errors import MissingExtraError
from lightning_speedkit.facts import Hardware

__all__ = ["missing_extra", "missing_needs"]

_DISTRIBUTION = "lightning-speedkit"
_CAPABILITY = re.compile(r"capability>=(\d+)\.(\d+)$")
_DEVICES = re.compile(r"devices>=(\d+)$")


def missing_needs(needs: Iterable[str], hardware: Hardware, *, num_nodes: int = 1) -> tuple[str, ...]:
    """Those of the needs that the machine lacks, each in words. Empty where all are met.

    Args:
        needs: As in :class:`~lightning_speedkit.registry.Preset`: ``"cuda"``, ``"gpu"``, ``"capability>=8.0"``,
            ``"devices>=2"``, ``"extra:quant"``.
        hardware: The machine, as the run sees it.
        num_nodes: So many machines like this one take part.

    >>> from lightning_speedkit.facts import Hardware
    >>> t4 = Hardware(accelerator="cuda", device_name="Tesla T4", capability=(7, 5))
    >>> missing_needs(["gpu", "capability>=8.0", "devices>=2"], t4)
    ('compute capability 8.0 or higher', '2 devices or more')
    """
    missing = (_missing(need, hardware, num_nodes) for need in needs)
    return tuple(text for text in missing if text)


def missing_extra(purpose: str, need: str) -> MissingExtraError | None:
    """The error for a need such as ``"extra:quant"`` that is not met; None where it is, and for any other need."""
    extra = need.removeprefix("extra:")
    if extra == need:
        return None
    if not _is_known(extra):
        return MissingExtraError(
            purpose, extra=extra, library=f"the extra {extra!r} of {_DISTRIBUTION}", install=_reinstall(extra)
        )
    libraries = " and ".join(_missing_libraries(extra))
    return MissingExtraError(purpose, extra=extra, library=libraries) if libraries else None


def _reinstall(extra: str) -> str:
    return f"pip install -U '{_DISTRIBUTION}[{extra}]', or pip install -e '.[{extra}]' in its source tree"


def _missing(need: str, hardware: Hardware, num_nodes: int) -> str:
    """What is missing, or an empty text."""
    if need == "cuda":
        return "" if hardware.accelerator == "cuda" else "a CUDA device"
    if need == "gpu":
        return "a GPU" if hardware.accelerator == "cpu" else ""
    if need == "native-bf16":
        emulates = hardware.accelerator != "cuda" and not hardware.native_bf16  # on CUDA the capability tells
        return "a device that computes bfloat16 natively (here it is emulated)" if emulates else ""
    if match := _CAPABILITY.match(need):
        wanted = (int(match[1]), int(match[2]))
        lacks = hardware.capability is not None and not hardware.is_rocm and hardware.capability < wanted
        return f"compute capability {match[1]}.{match[2]} or higher" if lacks else ""
    if match := _DEVICES.match(need):
        lacks = hardware.accelerator != "cpu" and hardware.device_count * num_nodes < int(match[1])
        return f"{match[1]} devices or more" if lacks else ""
    if need.startswith("extra:"):
        extra = need.removeprefix("extra:")
        if not _is_known(extra):
            return (
                f"the extra {extra!r}, which {_DISTRIBUTION} as it is installed does not know (reinstall it: "
                f"{_reinstall(extra)})"
            )
        libraries = _missing_libraries(extra)
        return f"{', '.join(libraries)} (pip install '{_DISTRIBUTION}[{extra}]')" if libraries else ""
    raise ValueError(
        f"A preset has the need {need!r}; known are 'cuda', 'gpu', 'capability>=8.0', 'native-bf16', 'devices>=2', "
        "'extra:quant'."
    )


def _is_known(extra: str) -> bool:
    """Whether the installed package has the extra; one installed from an older source tree lacks what is new in it."""
    try:
        known = importlib.metadata.metadata(_DISTRIBUTION).get_all("Provides-Extra") or []
    except importlib.metadata.PackageNotFoundError:
        return True
    return canonicalize_name(extra) in map(canonicalize_name, known)


def _missing_libraries(extra: str) -> list[str]:
    """The libraries of the extra that are not installed, as they are required."""
    try:
        lines = importlib.metadata.requires(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:  # run from a source tree: the technique itself tells what it lacks
        return []
    missing: list[str] = []
    for requirement in map(Requirement, lines):
        if requirement.marker is None or not requirement.marker.evaluate({"extra": extra}):
            continue
        if requirement.marker.evaluate({"extra": ""}):
            continue  # wanted without the extra too
        if requirement.name == _DISTRIBUTION:
            missing += [library for nested in sorted(requirement.extras) for library in _missing_libraries(nested)]
        elif not _is_installed(requirement):
            missing.append(requirement.name)
    return missing


def _is_installed(requirement: Requirement) -> bool:
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return requirement.specifier.contains(version, prereleases=True)

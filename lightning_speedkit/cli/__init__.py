"""The command line: ``speedkit`` and its subcommands, and SpeedkitCLI, a LightningCLI with presets.

Nothing is imported here until it is asked for: ``speedkit --help`` needs neither torch nor jsonargparse.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_speedkit.cli.lightning_cli import SpeedkitCLI

__all__ = ["SpeedkitCLI"]


def __getattr__(name: str) -> Any:
    if name == "SpeedkitCLI":
        from lightning_speedkit.cli.lightning_cli import SpeedkitCLI

        return SpeedkitCLI
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

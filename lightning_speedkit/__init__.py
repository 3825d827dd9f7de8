"""Training-efficiency techniques for PyTorch Lightning: callbacks, DataModules, strategies and presets by name."""

from lightning_speedkit.version import __version__

__all__ = ["__version__"]

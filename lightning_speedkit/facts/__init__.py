"""What was measured, as frozen dataclasses: plain data that needs neither torch nor lightning."""

from lightning_speedkit.facts.hardware import Hardware

__all__ = ["Hardware"]

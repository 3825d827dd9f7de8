"""Clocks and probes that turn a machine or a run into facts."""

from lightning_speedkit.measure.hardware import read_hardware

__all__ = ["read_hardware"]

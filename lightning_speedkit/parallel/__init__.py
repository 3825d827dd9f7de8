"""Techniques for several devices. To import it registers the names of its strategies with Lightning."""

from lightning_speedkit.parallel.ddp import SpeedkitDDPStrategy, register_comm_hook
from lightning_speedkit.parallel.pipeline import PipelineStrategy
from lightning_speedkit.parallel.strategies import register_strategies

__all__ = ["PipelineStrategy", "SpeedkitDDPStrategy", "register_comm_hook", "register_strategies"]

register_strategies()

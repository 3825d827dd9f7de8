"""Techniques for several devices. To import it registers the names of its strategies with Lightning."""

from lightning_speedkit.parallel.ddp import SpeedkitDDPStrategy
from lightning_speedkit.parallel.ddp_hooks import register_comm_hook
from lightning_speedkit.parallel.hang_watch import HangWatch
from lightning_speedkit.parallel.launch_check import Launch, check_launch
from lightning_speedkit.parallel.pipeline import PipelineStrategy
from lightning_speedkit.parallel.plan import ModelParallelPlan
from lightning_speedkit.parallel.plan_checkpoint import unshard_checkpoint
from lightning_speedkit.parallel.power_sgd import PowerSGD
from lightning_speedkit.parallel.resume import newest_checkpoint
from lightning_speedkit.parallel.spot_interruption import SpotInterruption
from lightning_speedkit.parallel.strategies import register_strategies
from lightning_speedkit.parallel.suggest import StrategyChoice, suggest_strategy

__all__ = [
    "HangWatch",
    "Launch",
    "ModelParallelPlan",
    "PipelineStrategy",
    "PowerSGD",
    "SpeedkitDDPStrategy",
    "SpotInterruption",
    "StrategyChoice",
    "check_launch",
    "newest_checkpoint",
    "register_comm_hook",
    "register_strategies",
    "suggest_strategy",
    "unshard_checkpoint",
]

register_strategies()

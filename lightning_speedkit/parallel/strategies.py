"""The names under which ``Trainer(strategy=...)`` knows the strategies of this area.

They are registered when ``lightning_speedkit.parallel`` is imported. The registry holds plain arguments only, and
each Trainer gets a strategy of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lightning_speedkit.parallel.ddp import SpeedkitDDPStrategy
from lightning_speedkit.parallel.pipeline import PipelineStrategy
from lightning_speedkit.parallel.plan import ModelParallelPlan

__all__ = ["STRATEGIES", "register_strategies"]

STRATEGIES: Mapping[str, tuple[type[Strategy], str, Mapping[str, Any]]] = {
    "speedkit_ddp": (SpeedkitDDPStrategy, "DDP with gradients as bucket views", {}),
    "speedkit_ddp_static": (
        SpeedkitDDPStrategy,
        "DDP on a static graph, also with gradient accumulation",
        {"static_graph": True},
    ),
    "speedkit_ddp_fp16": (SpeedkitDDPStrategy, "DDP that sends the gradients as fp16", {"comm_hook": "fp16"}),
    "speedkit_ddp_bf16": (SpeedkitDDPStrategy, "DDP that sends the gradients as bf16", {"comm_hook": "bf16"}),
    "speedkit_ddp_powersgd": (
        SpeedkitDDPStrategy,
        "DDP that sends the gradients as products of thin matrices",
        {"comm_hook": "powersgd"},
    ),
    "speedkit_model_parallel": (ModelParallelPlan, "FSDP2: weights sharded over the processes", {}),
    "speedkit_fsdp2_offload": (ModelParallelPlan, "FSDP2 whose shards wait in host memory", {"cpu_offload": True}),
    "speedkit_hsdp": (
        ModelParallelPlan,
        "Two copies of the weights, each sharded over half",
        {"replicas": 2},
    ),
    "speedkit_tensor_parallel_2": (ModelParallelPlan, "Layers cut between two processes", {"tensor_parallel": 2}),
    "speedkit_pipeline": (PipelineStrategy, "The layers of one nn.Sequential spread over the processes", {}),
}


def register_strategies() -> None:
    """Make the names known to Lightning. To call it again changes nothing.

    >>> register_strategies()
    >>> "speedkit_ddp" in StrategyRegistry
    True
    """
    for name, (strategy, description, arguments) in STRATEGIES.items():
        StrategyRegistry.register(name, strategy, description=description, override=True, **arguments)

"""The presets of this area."""

from __future__ import annotations

from lightning_speedkit.registry import Preset, TrainerPatch

__all__ = ["PRESETS"]

PRESETS: tuple[Preset, ...] = (
    Preset(
        name="ddp",
        kind="parallel",
        summary="One process per device, gradients averaged.",
        patch=TrainerPatch(arguments={"strategy": "speedkit_ddp"}),
        needs=("devices>=2",),
    ),
    Preset(
        name="ddp-static",
        kind="parallel",
        summary="DDP for a model that uses the same parameters in every step; also with accumulation.",
        patch=TrainerPatch(arguments={"strategy": "speedkit_ddp_static"}),
        needs=("devices>=2",),
    ),
    Preset(
        name="pipeline",
        kind="parallel",
        summary="The layers of the module's only nn.Sequential spread over the devices, in four micro-batches.",
        patch=TrainerPatch(arguments={"strategy": "speedkit_pipeline"}),
        needs=("devices>=2",),
    ),
)

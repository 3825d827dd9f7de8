"""The presets of this area."""

from __future__ import annotations

from lightning_speedkit.parallel.hang_watch import HangWatch
from lightning_speedkit.registry import Part, Preset, TrainerPatch

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
    *(
        Preset(
            name=f"ddp-{hook}",
            kind="parallel",
            summary=summary,
            patch=TrainerPatch(arguments={"strategy": f"speedkit_ddp_{hook}"}),
            needs=("devices>=2",),
        )
        for hook, summary in (
            ("fp16", "DDP that sends half the bytes, as fp16; for slow links and gradients below 65504."),
            ("bf16", "DDP that sends half the bytes, as bf16; for slow links."),
            ("powersgd", "DDP that sends gradients as products of thin matrices; for very slow links, less exact."),
        )
    ),
    Preset(
        name="sync-batchnorm",
        kind="parallel",
        summary="BatchNorm over the samples of all ranks; for batches that are small on each.",
        patch=TrainerPatch(arguments={"sync_batchnorm": True}),
        needs=("devices>=2",),
    ),
    Preset(
        name="fsdp2",
        kind="parallel",
        summary="Weights, gradients and optimizer state sharded over the devices; any module, nothing to configure.",
        patch=TrainerPatch(arguments={"strategy": "speedkit_model_parallel"}),
        needs=("devices>=2",),
    ),
    Preset(
        name="fsdp2-offload",
        kind="parallel",
        summary="FSDP2 whose shards wait in host memory; slower, for models that fit in no other way.",
        patch=TrainerPatch(arguments={"strategy": "speedkit_fsdp2_offload"}),
        needs=("devices>=2",),
    ),
    Preset(
        name="hsdp",
        kind="parallel",
        summary="Two copies of the weights, each sharded over half the devices; for two machines with a slow link.",
        patch=TrainerPatch(arguments={"strategy": "speedkit_hsdp"}),
        needs=("devices>=4",),
    ),
    Preset(
        name="tensor-parallel-2",
        kind="parallel",
        summary="Layers cut between two devices, found by structure; for layers that fit on no device.",
        patch=TrainerPatch(arguments={"strategy": "speedkit_tensor_parallel_2"}),
        needs=("devices>=2",),
    ),
    Preset(
        name="pipeline",
        kind="parallel",
        summary="The layers of the module's only nn.Sequential spread over the devices, in four micro-batches.",
        patch=TrainerPatch(arguments={"strategy": "speedkit_pipeline"}),
        needs=("devices>=2",),
    ),
    Preset(
        name="hang-watch",
        kind="parallel",
        summary="If no batch goes on for ten minutes: which rank the others wait for, and the stack of each.",
        patch=TrainerPatch(callbacks=(Part(HangWatch, {}),)),
    ),
)

"""The presets of this area."""

from __future__ import annotations

from lightning_speedkit.parallel.hang_watch import HangWatch
from lightning_speedkit.registry import Part, Preset, TrainerPatch

__all__ = ["PRESETS"]

_STRATEGIES = (  # the preset's name and the strategy's, and what it does
    ("ddp", "speedkit_ddp", "One process per device, gradients averaged."),
    (
        *("ddp-static", "speedkit_ddp_static"),
        "DDP for a model that uses the same parameters in every step; also with accumulation.",
    ),
    (
        *("ddp-fp16", "speedkit_ddp_fp16"),
        "DDP that sends half the bytes, as fp16; for slow links and gradients below 65504.",
    ),
    ("ddp-bf16", "speedkit_ddp_bf16", "DDP that sends half the bytes, as bf16; for slow links."),
    (
        *("ddp-powersgd", "speedkit_ddp_powersgd"),
        "DDP that sends gradients as products of thin matrices; for very slow links, less exact.",
    ),
    (
        *("fsdp2", "speedkit_model_parallel"),
        "Weights, gradients and optimizer state sharded over the devices; any module, nothing to configure.",
    ),
    (
        *("fsdp2-offload", "speedkit_fsdp2_offload"),
        "FSDP2 whose shards wait in host memory; for models that fit in no other way.",
    ),
    (
        *("hsdp", "speedkit_hsdp"),
        "Two copies of the weights, each sharded over half the devices; for two machines with a slow link.",
    ),
    (
        *("tensor-parallel-2", "speedkit_tensor_parallel_2"),
        "Layers cut between two devices, found by structure; for layers that fit on no device.",
    ),
    (
        *("pipeline", "speedkit_pipeline"),
        "The layers of the module's only nn.Sequential spread over the devices, in four micro-batches.",
    ),
)

PRESETS: tuple[Preset, ...] = (
    *(
        Preset(
            name=name,
            kind="parallel",
            summary=summary,
            patch=TrainerPatch(arguments={"strategy": strategy}),
            needs=("devices>=4" if name == "hsdp" else "devices>=2",),
        )
        for name, strategy, summary in _STRATEGIES
    ),
    Preset(
        name="sync-batchnorm",
        kind="parallel",
        summary="BatchNorm over the samples of all ranks; on CPUs beside a ddp preset. For small batches on each.",
        patch=TrainerPatch(arguments={"sync_batchnorm": True}),
        needs=("devices>=2",),
    ),
    Preset(
        name="hang-watch",
        kind="parallel",
        summary="If no batch goes on for ten minutes: which rank the others wait for, and the stack of each.",
        patch=TrainerPatch(callbacks=(Part(HangWatch, {}),)),
    ),
)

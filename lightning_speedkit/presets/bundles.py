"""Bundles: presets for a kind of machine, made of other presets.

The precision of a bundle is ``precision-auto``: it follows the accelerator that the run really uses, also where the
user overrides the one that the bundle sets.
"""

from __future__ import annotations

from lightning_speedkit.registry import Preset, TrainerPatch

__all__ = ["PRESETS"]

PRESETS: tuple[Preset, ...] = (
    Preset(
        name="cpu",
        kind="bundle",
        summary="One process on the CPU, in bfloat16 where the CPU computes in it.",
        includes=("precision-auto",),
        patch=TrainerPatch(arguments={"accelerator": "cpu", "devices": 1}),
    ),
    Preset(
        name="single-gpu",
        kind="bundle",
        summary="One GPU, in the precision that it is fastest in, with cuDNN's autotuner.",
        includes=("precision-auto",),
        patch=TrainerPatch(arguments={"accelerator": "gpu", "devices": 1, "benchmark": True}),
        needs=("gpu",),
    ),
    Preset(
        name="multi-gpu",
        kind="bundle",
        summary="All GPUs of this machine, data parallel, in the precision that they are fastest in.",
        includes=("precision-auto", "ddp"),
        patch=TrainerPatch(arguments={"accelerator": "gpu", "devices": "auto", "benchmark": True}),
        needs=("gpu", "devices>=2"),
    ),
    Preset(
        name="low-memory",
        kind="bundle",
        summary="Less activation memory: divide your batch_size by 4, the effective batch stays the same.",
        includes=("precision-auto", "checkpoint-activations", "accumulate-4"),
    ),
)

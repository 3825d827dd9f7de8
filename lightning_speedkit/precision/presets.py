"""The presets of numerical precision."""

from __future__ import annotations

from lightning_speedkit.facts import Hardware
from lightning_speedkit.precision.autocast import fastest_precision
from lightning_speedkit.precision.channels_last import ChannelsLast
from lightning_speedkit.precision.compile import CompileModel
from lightning_speedkit.precision.float8 import Float8Precision
from lightning_speedkit.precision.matmul import MatmulPrecision
from lightning_speedkit.precision.mixed import SpeedkitMixedPrecision
from lightning_speedkit.registry import Part, Preset, TrainerPatch

__all__ = ["PRESETS"]

_FP32 = TrainerPatch(arguments={"precision": "32-true"})
_BF16 = TrainerPatch(plugins=(Part(SpeedkitMixedPrecision, {"precision": "bf16-mixed"}),))
_FP16 = TrainerPatch(plugins=(Part(SpeedkitMixedPrecision, {"precision": "16-mixed"}),))
_TF32 = TrainerPatch(
    arguments={"precision": "32-true"},
    callbacks=(Part(MatmulPrecision, {"matmul": "high", "convolutions": "tf32"}),),
)


def _fastest(hardware: Hardware) -> TrainerPatch:
    return {"32-true": _FP32, "bf16-mixed": _BF16, "16-mixed": _FP16}[fastest_precision(hardware)]


PRESETS: tuple[Preset, ...] = (
    Preset(
        name="fp32",
        kind="precision",
        summary="Everything in float32: the reference that the others are compared with.",
        patch=_FP32,
    ),
    Preset(
        name="tf32",
        kind="precision",
        summary="Everything in float32, multiplied in TF32 on tensor cores. For NVIDIA GPUs from Ampere on.",
        patch=_TF32,
        needs=("cuda", "capability>=8.0"),
    ),
    Preset(
        name="bf16-mixed",
        kind="precision",
        summary="Weights in float32, matrix products in bfloat16; no loss scaling. For devices with native bf16.",
        patch=_BF16,
        needs=("capability>=8.0", "native-bf16"),
    ),
    Preset(
        name="bf16-true",
        kind="precision",
        summary="Weights, gradients and optimizer state in bfloat16: half the memory, small updates are rounded off.",
        patch=TrainerPatch(arguments={"precision": "bf16-true"}),
        needs=("capability>=8.0", "native-bf16"),
    ),
    Preset(
        name="fp16-mixed",
        kind="precision",
        summary="Weights in float32, matrix products in float16 with a loss scaler. For GPUs without native bf16.",
        patch=_FP16,
        needs=("gpu",),
    ),
    Preset(
        name="fp8",
        kind="precision",
        summary="Linear layers in float8, the rest as in bf16-mixed, by torchao. For Ada, Hopper and later.",
        patch=TrainerPatch(plugins=(Part(Float8Precision, {}),)),
        needs=("cuda", "capability>=8.9", "extra:fp8"),
    ),
    Preset(
        name="precision-auto",
        kind="precision",
        summary="The precision that this device computes natively: bf16-mixed, fp16-mixed or fp32.",
        patch=_fastest,
    ),
    Preset(
        name="compile",
        kind="compile",
        summary="torch.compile of the networks, in place; eager where it fails, and a report whether it paid.",
        patch=TrainerPatch(callbacks=(Part(CompileModel),)),
    ),
    Preset(
        name="compile-blocks",
        kind="compile",
        summary="torch.compile of each repeated block, compiled once for all of them: less waiting than compile.",
        patch=TrainerPatch(callbacks=(Part(CompileModel, {"modules": "blocks"}),)),
    ),
    Preset(
        name="channels-last",
        kind="compile",
        summary="Convolution weights and images in channels-last order.",
        patch=TrainerPatch(callbacks=(Part(ChannelsLast),)),
    ),
)

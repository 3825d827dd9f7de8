"""The presets of numerical precision."""

from __future__ import annotations

from lightning_speedkit.facts import Hardware
from lightning_speedkit.precision.autocast import fastest_precision
from lightning_speedkit.precision.mixed import SpeedkitMixedPrecision
from lightning_speedkit.registry import Part, Preset, TrainerPatch

__all__ = ["PRESETS"]

_FP32 = TrainerPatch(arguments={"precision": "32-true"})
_BF16 = TrainerPatch(plugins=(Part(SpeedkitMixedPrecision, {"precision": "bf16-mixed"}),))
_FP16 = TrainerPatch(plugins=(Part(SpeedkitMixedPrecision, {"precision": "16-mixed"}),))


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
        name="bf16-mixed",
        kind="precision",
        summary="Weights in float32, matrix products in bfloat16; no loss scaling. For devices with native bf16.",
        patch=_BF16,
        needs=("capability>=8.0",),
    ),
    Preset(
        name="fp16-mixed",
        kind="precision",
        summary="Weights in float32, matrix products in float16 with a loss scaler. For GPUs without native bf16.",
        patch=_FP16,
        needs=("gpu",),
    ),
    Preset(
        name="precision-auto",
        kind="precision",
        summary="The precision that this device computes natively: bf16-mixed, fp16-mixed or fp32.",
        patch=_fastest,
    ),
)

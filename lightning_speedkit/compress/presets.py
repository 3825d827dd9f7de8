"""The presets of this area."""

from __future__ import annotations

from lightning_speedkit.compress.prune import Pruning
from lightning_speedkit.compress.quantize import QuantizeOnFitEnd
from lightning_speedkit.compress.quantize_aware import QuantizationAwareTraining
from lightning_speedkit.compress.shrink import StructuredPruning
from lightning_speedkit.registry import Part, Preset, TrainerPatch

__all__ = ["PRESETS"]

_COPIES = "it keeps copies of tensors in their old shapes; use it in a second fit, of the shrunk model"
_COMPILED = "a network is compiled for the shapes that it has; shrink it first, and compile it in a second fit"

PRESETS: tuple[Preset, ...] = (
    Preset(
        name="quantize-int8",
        kind="compress",
        summary="A quantized copy when training ends: the fastest engine here, kept if it gains and the metric holds.",
        patch=TrainerPatch(callbacks=(Part(QuantizeOnFitEnd, {}),)),
    ),
    Preset(
        name="quantize-aware",
        kind="compress",
        summary="The last fifth of training rounds weights and inputs as int8 will, so that quantizing costs less.",
        patch=TrainerPatch(callbacks=(Part(QuantizationAwareTraining, {}),)),
    ),
    Preset(
        name="prune",
        kind="compress",
        summary="80 % of the weights set to zero while training goes on; for smaller files and sparse runtimes.",
        patch=TrainerPatch(callbacks=(Part(Pruning, {"target_sparsity": 0.8}),)),
    ),
    Preset(
        name="prune-2-4",
        kind="compress",
        summary="Two of each four inputs set to zero while training goes on; for GPUs with sparse tensor cores.",
        patch=TrainerPatch(callbacks=(Part(Pruning, {"pattern": "2:4"}),)),
    ),
    Preset(
        name="prune-channels",
        kind="compress",
        summary="Half the channels, units and heads removed during training, so that the network is really smaller.",
        patch=TrainerPatch(callbacks=(Part(StructuredPruning, {"ratio": 0.5}),)),
        needs=("extra:prune",),
        not_beside={
            **dict.fromkeys(("compile", "compile-blocks"), _COMPILED),
            **dict.fromkeys(("ema", "swa", "guard-non-finite", "guard-spikes", "guard-rollback"), _COPIES),
            **dict.fromkeys(("prune", "prune-2-4", "quantize-aware"), _COPIES),
        },
    ),
)

"""The cases of the check on a GPU, in the order in which they run: what matters most comes first.

To add one, write ``function(run: CaseRun) -> None`` in the file of its area and add a line here. It must also run on
the CPU with tiny sizes, unless it needs CUDA. Nothing is imported here, so that whoever starts processes stays light.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CASES", "Case"]


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table.

    ``function`` is ``"module:function"``, in ``benchmarks.gpu_cases`` if there is no dot. ``seconds`` is what it may
    take, from when its process has imported what all need; where less than half of them are left it is not run.
    ``needs`` are ``"cuda"``, ``"capability>=8.9"``, ``"memory>=8"`` (GiB of the device), or names of modules that must
    be installed, of which one is enough in ``"timm or torchvision"``; also in tiny mode.
    """

    name: str
    area: str
    function: str
    seconds: float = 8.0
    needs: tuple[str, ...] = ()


CASES: tuple[Case, ...] = (
    Case("precision transformer", "precision", "precision:transformer_steps", 7),
    Case("precision resnet50", "precision", "precision:resnet50", 7),
    Case("channels-last resnet50", "precision", "precision:channels_last", 6),
    Case("mixed precision plugin", "precision", "plugins:mixed_precision", 5),
    Case("gradient scaler", "precision", "plugins:gradient_scaler", 5),
    Case("presets", "all", "presets:every_preset", 10),
    Case("precision and memory callbacks", "all", "presets:callbacks", 6),
    Case("checkpoint policies", "memory", "checkpointing:policies", 6),
    Case("checkpoint budget", "memory", "checkpointing:budget", 7),
    Case("estimate_memory", "memory", "memory:estimate", 6),
    Case("memory errors", "memory", "out_of_memory:recognized", 5, needs=("cuda",)),
    Case("AutoMicroBatch", "optimize", "out_of_memory:micro_batch", 6),
    Case("BatchSizeSearch", "memory", "out_of_memory:batch_size_search", 7),
    Case("OOMSnapshot", "memory", "out_of_memory:snapshot", 5),
    Case("PeakMemory and CacheRelease", "memory", "memory:peaks", 5),
    Case("LeakMonitor", "memory", "memory:leak_monitor", 6),
    Case("pinned ring and prefetch", "data", "data:prefetch", 8),
    Case("device transforms", "data", "data:transforms", 5),
    Case("optimizers", "optimize", "optimizers:named", 5),
    Case("NonFiniteGuard", "optimize", "optimizers:non_finite_guard", 5),
    Case("GradientClipping", "optimize", "optimizers:clipping", 4),
    Case("run recorder", "measure", "recorder:overhead", 5),
    Case("Distillation", "compress", "distillation:distilled", 5),
    Case("2:4 sparsity", "compress", "pruning:two_of_four", 5),
    Case("Pruning 2:4", "compress", "pruning:two_of_four_fit", 5),
    Case("StructuredPruning", "compress", "pruning:channels", 12, needs=("torch_pruning",)),
    Case("lighten", "architecture", "lighter_networks:lightened", 7),
    Case("pick_backbone", "architecture", "lighter_networks:backbones", 11, needs=("timm or torchvision",)),
    Case("compile default", "precision", "compiling:default", 12),
    Case("CompileModel", "precision", "compiling:callback", 12),
    Case("int8 inference", "compress", "quantization:int8", 16, needs=("torchao",)),
    Case("fp8 inference", "compress", "quantization:fp8", 11, needs=("torchao",)),
    Case("QuantizeOnFitEnd", "compress", "quantization:on_fit_end", 18, needs=("torchao",)),
    Case("adamw-8bit", "optimize", "optimizers:eight_bit", 8, needs=("torchao",)),
    Case("adamw-cpu-offload", "optimize", "optimizers:offloaded", 5, needs=("cuda", "torchao")),
    Case("fp8 training", "precision", "compiling:fp8_training", 12, needs=("cuda", "capability>=8.9", "torchao")),
    Case("compile reduce-overhead", "precision", "compiling:reduce_overhead", 9, needs=("cuda",)),
    Case("fastest_precision", "precision", "precision:fastest", 4),
    Case("compile max-autotune", "precision", "compiling:max_autotune", 12, needs=("cuda",)),
)

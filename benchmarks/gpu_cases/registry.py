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
    be installed; also in tiny mode.
    """

    name: str
    area: str
    function: str
    seconds: float = 8.0
    needs: tuple[str, ...] = ()


CASES: tuple[Case, ...] = (
    Case("precision transformer", "precision", "precision:transformer_steps", 12),
    Case("precision resnet50", "precision", "precision:resnet50", 14),
    Case("channels-last resnet50", "precision", "precision:channels_last", 10),
    Case("mixed precision plugin", "precision", "plugins:mixed_precision", 10),
    Case("gradient scaler", "precision", "plugins:gradient_scaler", 9),
    Case("presets", "all", "presets:every_preset", 14),
    Case("precision and memory callbacks", "all", "presets:callbacks", 8),
    Case("checkpoint policies", "memory", "checkpointing:policies", 10),
    Case("checkpoint budget", "memory", "checkpointing:budget", 12),
    Case("estimate_memory", "memory", "memory:estimate", 10),
    Case("memory errors", "memory", "out_of_memory:recognized", 7, needs=("cuda",)),
    Case("AutoMicroBatch", "optimize", "out_of_memory:micro_batch", 10),
    Case("BatchSizeSearch", "memory", "out_of_memory:batch_size_search", 12),
    Case("OOMSnapshot", "memory", "out_of_memory:snapshot", 8),
    Case("PeakMemory and CacheRelease", "memory", "memory:peaks", 7),
    Case("LeakMonitor", "memory", "memory:leak_monitor", 8),
    Case("pinned ring and prefetch", "data", "data:prefetch", 14),
    Case("device transforms", "data", "data:transforms", 8),
    Case("optimizers", "optimize", "optimizers:named", 8),
    Case("NonFiniteGuard", "optimize", "optimizers:non_finite_guard", 8),
    Case("GradientClipping", "optimize", "optimizers:clipping", 7),
    Case("run recorder", "measure", "recorder:overhead", 8),
    Case("QuantizeOnFitEnd", "compress", "compression:quantize_on_fit_end", 10),
    Case("compile default", "precision", "compiling:default", 25),
    Case("CompileModel", "precision", "compiling:callback", 22),
    Case("2:4 sparsity", "compress", "compression:two_of_four", 7, needs=("cuda", "capability>=8.0")),
    Case("adamw-8bit", "optimize", "optimizers:eight_bit", 14, needs=("torchao",)),
    Case("adamw-cpu-offload", "optimize", "optimizers:offloaded", 8, needs=("cuda", "torchao")),
    Case("fp8 training", "precision", "compiling:fp8_training", 22, needs=("cuda", "capability>=8.9", "torchao")),
    Case("int8 inference", "compress", "compression:int8_inference", 14, needs=("cuda", "torchao")),
    Case("fp8 inference", "compress", "compression:fp8_inference", 12, needs=("cuda", "capability>=8.9", "torchao")),
    Case("compile reduce-overhead", "precision", "compiling:reduce_overhead", 20, needs=("cuda",)),
    Case("fastest_precision", "precision", "precision:fastest", 7),
    Case("compile max-autotune", "precision", "compiling:max_autotune", 30, needs=("cuda",)),
)

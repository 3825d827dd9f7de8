"""What the default candidates of ``pick_backbone`` cost on small pictures, each in a fresh process, against ResNet-18.

Every round measures every candidate anew: the ratio of a metric is ResNet-18's to the candidate's in the same round.
FLOPs mislead as far as their ratio is another one than that of the times.

    python -m benchmarks.backbones [--rounds 5] [--smoke]
"""

from __future__ import annotations

from benchmarks.harness import Variant, benchmark_arguments, run_benchmark

_FUNCTION = "benchmarks.backbones:measure"
_REFERENCE = "torchvision:resnet18"
_NAMES = (
    _REFERENCE,
    "timm:mobilenetv3_small_050",
    "torchvision:mobilenet_v3_small",
    "torchvision:mobilenet_v3_large",
    "torchvision:mobilenet_v2",
    "timm:efficientnet_lite0",
    "torchvision:efficientnet_b0",
    "timm:regnety_002",
    "torchvision:regnet_y_400mf",
    "timm:convnext_atto",
    "torchvision:convnext_tiny",
    "timm:vit_tiny_patch16_224",
)


def measure(name: str, size: int, batch_size: int, seconds: float) -> dict[str, float]:
    """Measure one candidate on pictures of ``size`` by ``size`` pixels, on one thread."""
    from lightning_speedkit.architecture import pick_backbone

    shape, options = (3, size, size), {"device": "cpu", "batch_size": batch_size, "progress": False}
    row = pick_backbone(shape, 10, candidates=[name], seconds=seconds, **options)[name]
    return {
        "parameters": row.parameters,
        "flops": row.flops,
        "latency_ms": row.latency_ms,
        "batch_latency_ms": row.batch_latency_ms,
        "inference_memory_mib": row.inference_memory_mib,
        "training_memory_mib": row.training_memory_mib,
        "training_seconds_per_sample": 1 / row.training_samples_per_second,
    }


def main() -> None:
    """Run it."""
    arguments = benchmark_arguments(__doc__)
    options = {"size": 32, "batch_size": 2, "seconds": 0.01} if arguments.smoke else {"size": 64, "batch_size": 32}
    if not arguments.smoke:
        options["seconds"] = 10
    names = _NAMES[:3] if arguments.smoke else _NAMES
    run_benchmark(
        "backbones",
        [Variant(name, _FUNCTION, {"name": name, **options}, requires=name.partition(":")[0]) for name in names],
        baseline=_REFERENCE,
        rounds=arguments.rounds,
        warmup=0,
        results=arguments.results,
        forked=arguments.smoke,
    )


if __name__ == "__main__":
    main()

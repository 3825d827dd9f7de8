"""Results with round numbers, for tests of what is told about them."""

from __future__ import annotations

from lightning_speedkit.demo.results import (
    DemoResults,
    DiskResult,
    Latency,
    QuantizationResult,
    TrainingResult,
)
from lightning_speedkit.facts import Hardware, StepTiming


def training(
    name: str, *, wall: float, data: float, accuracy: float = 0.98, precision: str = "32-true", digest: str = "aa"
) -> TrainingResult:
    """100 steps of 64 samples; what is not data is computing, but for a tenth of a second."""
    timing = StepTiming(
        steps=100, samples=6400, seconds_wall=wall, seconds_data=data, seconds_compute=wall - data - 0.1
    )
    return TrainingResult(
        name=name,
        description=f"how {name} works",
        precision=precision,
        timing=timing,
        seconds_fit=wall + 1,
        test_accuracy=accuracy,
        weights_digest=digest,
    )


def results() -> DemoResults:
    """Everything faster but int8 at batch 1."""
    return DemoResults(
        hardware=Hardware(accelerator="cpu", device_name="a CPU", cpu_count=2, memory_bytes=8 * 2**30),
        versions={"torch": "2.13.0", "lightning": "2.6.6"},
        quick=False,
        seed=0,
        epochs=8,
        batch_size=64,
        image_size=64,
        samples={"train": 1197, "val": 200, "test": 400},
        bundle="cpu",
        disk=DiskResult(
            files=1797,
            file_bytes=3_000_000,
            file_allocated_bytes=7_500_000,
            payload_bytes=7_000_000,
            store_bytes=7_140_000,
            seconds_packing=0.8,
        ),
        trainings=(
            training("files", wall=4.0, data=1.0),
            training("files, 2 workers", wall=3.2, data=0.2, accuracy=0.98),
            training("LMDB", wall=3.2, data=0.1),
            training("LMDB, preset cpu", wall=2.0, data=0.1, accuracy=0.975, precision="bf16-mixed", digest="bb"),
        ),
        quantization=QuantizationResult(
            kept=True,
            reason="within the limit",
            backend="torch-ao-static",
            layers_quantized=5,
            layers_total=5,
            bytes_float=1_024_000,
            bytes_int8=256_000,
            latencies=(
                Latency(batch_size=1, seconds_float=0.001, seconds_int8=0.002),
                Latency(batch_size=64, seconds_float=0.012, seconds_int8=0.004),
            ),
            test_accuracy_float=0.98,
            test_accuracy_int8=0.9775,
        ),
        seconds_total=61.5,
    )

"""Seconds per training step under each precision preset that runs on this device, for a convolutional and a linear net.

Beside the presets, float32 with its matrix products at the level "medium" (MatmulPrecision): TF32 on CUDA, bfloat16 on
some CPUs.

python -m benchmarks.precision [--rounds 5] [--smoke]
"""

from __future__ import annotations

import itertools
import os

from benchmarks.harness import Variant, benchmark_arguments, run_benchmark

_FUNCTION = "benchmarks.precision:measure"


def measure(steps: int, preset: str, net: str, matmul: str | None = None) -> dict[str, float]:
    """Train on random images under a preset; the median seconds per step."""
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_speedkit import RunRecorder, trainer_kwargs
    from lightning_speedkit.precision import MatmulPrecision

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            if net == "conv":
                widths = [3, 32, 64, 128]
                layers: list[nn.Module] = []
                for before, after in itertools.pairwise(widths):
                    layers += [nn.Conv2d(before, after, 3, 2, 1), nn.BatchNorm2d(after), nn.ReLU()]
                self.net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
            else:
                self.net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 1024), nn.ReLU(), nn.Linear(1024, 10))

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]).float(), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64 * 8, 3, 32, 32), torch.randint(10, (64 * 8,)))
    recorder = RunRecorder()
    callbacks = [recorder, *([] if matmul is None else [MatmulPrecision(matmul)])]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    arguments = trainer_kwargs(preset, max_epochs=-(-steps // 8), callbacks=callbacks, devices=1, **quiet)
    Trainer(**arguments, enable_model_summary=False).fit(Module(), DataLoader(data, batch_size=64))
    return {"seconds_per_step": recorder.run.train.median_seconds_per_step}


def main() -> None:
    """Measure and write the results."""
    options = benchmark_arguments("Seconds per step under each precision preset.", 5)
    from lightning_speedkit import presets
    from lightning_speedkit.measure import read_hardware
    from lightning_speedkit.presets.selection import can_run

    names = ("fp32", "tf32", "bf16-mixed", "bf16-true", "fp16-mixed", "fp8")
    names = tuple(name for name in names if not can_run(presets.get(name), read_hardware()))
    settings = {name: {"preset": name} for name in names}
    settings["fp32, matmul medium"] = {"preset": "fp32", "matmul": "medium"}
    steps, threads = (8, 1) if options.smoke else (80, len(os.sched_getaffinity(0)))
    run_benchmark(
        "precision",
        [
            Variant(f"{net}, {name}", _FUNCTION, {"steps": steps, "net": net, **setting}, f"{net}, fp32")
            for net in ("conv", "linear")
            for name, setting in settings.items()
            if (net, name) != ("conv", "fp8")  # it takes linear layers only
        ],
        rounds=options.rounds,
        warmup=options.warmup,
        forked=options.smoke,
        environment={"OMP_NUM_THREADS": str(threads)},
        results=options.results,
    )


if __name__ == "__main__":
    main()

"""Whether a run with bad batches ends where the clean run ends: with guards, and without.

A small network learns a function. Among its batches are some whose targets are far off (a spike of the loss) and a run
of batches with NaN. Each variant returns the loss on clean held-out data, at most 1e6, which also stands for NaN; no
variant's time is measured. The losses of all variants are drawn into ``spikes.svg`` beside the result file.

    python -m benchmarks.spikes [--rounds 3] [--smoke]
"""

from __future__ import annotations

import importlib
import math
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import Variant, benchmark_arguments, run_benchmark

_FUNCTION = "benchmarks.spikes:measure"
_WORST = 1e6  # a number that a result file can hold
_GUARDS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "none": [],
    "clipping": [("clip.GradientClipping", {"limit": 1.0})],
    "non-finite": [("non_finite_guard.NonFiniteGuard", {})],
    "skip": [("spike_guard.SpikeGuard", {"action": "skip"})],
    "rollback": [("spike_guard.SpikeGuard", {"action": "rollback", "snapshot_every": 10})],
    "all": [
        ("non_finite_guard.NonFiniteGuard", {}),
        ("spike_guard.SpikeGuard", {}),
        ("clip.GradientClipping", {"by": "zclip"}),
    ],
}


def train(steps: int, guards: str, faults: str, seed: int = 0) -> tuple[float, list[float]]:
    """The loss on held-out data, and that of every training batch.

    ``faults`` is ``"none"``, ``"spikes"`` (three batches with targets 1000 times too large), ``"nan"`` (five batches
    in a row) or ``"both"``.
    """
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from torch import nn
    from torch.utils.data import DataLoader

    def target(x: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        noise = 0.3 * torch.randn(len(x), 1, generator=generator)
        return x[:, :1].sin() + x[:, 1:2] * x[:, 2:3] + noise

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
            self.losses: list[float] = []

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)  # so that runs end calm
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    torch.manual_seed(seed)
    model = Module()
    inputs = torch.randn(steps, 64, 4)
    batches = [[x, target(x)] for x in inputs]
    if faults in ("spikes", "both"):
        for place in (steps // 3, steps // 2, 3 * steps // 4):
            batches[place][1] *= 1000.0
    if faults in ("nan", "both"):
        for place in range(3 * steps // 5, 3 * steps // 5 + 5):
            batches[place][0][0, 0] = math.nan
    callbacks = [_built(path, arguments) for path, arguments in _GUARDS[guards]]
    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            max_epochs=1,
            accelerator="cpu",
            devices=1,
            callbacks=callbacks,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(model, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(99)
    x = torch.randn(5000, 4, generator=generator)
    with torch.no_grad():
        loss = nn.functional.mse_loss(model.eval().net(x), target(x, generator)).item()
    return (min(loss, _WORST) if math.isfinite(loss) else _WORST), model.losses


def measure(steps: int, guards: str, faults: str, seed: int = 0) -> dict[str, float]:
    """``final_loss``: on held-out data, when training has ended."""
    return {"final_loss": train(steps, guards, faults, seed)[0]}


def _built(path: str, arguments: dict[str, Any]) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"lightning_speedkit.optimize.{module}"), name)(**arguments)


def variants(steps: int) -> list[Variant]:
    """The clean run, and runs with faults under each guard."""
    told = [("clean", "none", "none"), ("clean, all guards", "all", "none")]
    told += [(f"{faults}, unguarded", "none", faults) for faults in ("spikes", "nan", "both")]
    told += [("spikes, clipping", "clipping", "spikes"), ("nan, NonFiniteGuard", "non-finite", "nan")]
    told += [("both, SpikeGuard skip", "skip", "both"), ("both, SpikeGuard rollback", "rollback", "both")]
    told += [("both, all guards", "all", "both")]
    return [Variant(name, _FUNCTION, {"steps": steps, "guards": g, "faults": f}) for name, g, f in told]


def draw(curves: dict[str, list[float]], path: Path) -> Path:
    """The loss of every batch of each run, on a logarithmic axis; what is not finite is left out."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="batch", ylabel="training loss", yscale="log")
    for name, losses in curves.items():
        shown = [loss if math.isfinite(loss) and loss < _WORST else math.nan for loss in losses]
        axes.plot(shown, label=name, linewidth=1)
    axes.legend()
    figure.savefig(path)
    return path


def main() -> None:
    """Run it from the command line."""
    arguments = benchmark_arguments("Where runs with bad batches end.", rounds=3)
    steps = 120 if arguments.smoke else 1000
    run_benchmark(
        "spikes",
        variants(steps),
        baseline="clean",
        rounds=arguments.rounds,
        warmup=0,
        results=arguments.results,
    )
    drawn = {"clean": ("none", "none"), "unguarded": ("none", "both"), "SpikeGuard, rollback": ("rollback", "both")}
    curves = {name: train(steps, *chosen)[1] for name, chosen in drawn.items()}
    print(f"Drawn: {draw(curves, arguments.results / 'spikes.svg')}")


if __name__ == "__main__":
    main()

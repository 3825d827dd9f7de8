"""What exact accumulation, clipping and the guards cost per batch, over Lightning's own accumulation and clipping.

The model is tiny on purpose: what does not shrink with the model is all there is to see. Each variant is held against
the Trainer that does the same work with its own arguments.

    python -m benchmarks.step_overhead [--rounds 15] [--smoke]
"""

from __future__ import annotations

import importlib
import itertools
import statistics
import tempfile
import time
from typing import Any

from benchmarks.harness import Variant, benchmark_arguments, run_benchmark

_FUNCTION = "benchmarks.step_overhead:measure"
_WARMUP_BATCHES = 100
_WINDOW = 4
_OURS = {
    "accumulate.AccumulationScheduler": {"schedule": _WINDOW},
    "clip.GradientClipping": {"limit": 1.0},
    "non_finite_guard.NonFiniteGuard": {},
    "spike_guard.SpikeGuard": {},
}


def measure(
    batches: int, callbacks: dict[str, dict[str, Any]] | None = None, trainer: dict[str, Any] | None = None
) -> dict[str, float]:
    """Train on so many batches; the median over windows of 4 batches, per batch: ``microseconds_per_batch``."""
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer
    from torch import nn
    from torch.utils.data import DataLoader

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    class Stopwatch(Callback):
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_train_batch_end(self, *arguments: Any) -> None:
            self.ends.append(time.perf_counter())

    torch.manual_seed(0)
    data = list(torch.randn(batches, 8, 32))
    stopwatch = Stopwatch()
    built = [_built(path, arguments) for path, arguments in (callbacks or {}).items()]
    with tempfile.TemporaryDirectory() as folder:
        run = Trainer(
            max_epochs=1,
            accelerator="cpu",
            devices=1,
            callbacks=[*built, stopwatch],
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **(trainer or {}),
        )
        run.fit(Module(), DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    windows = [later - earlier for earlier, later in itertools.pairwise(stopwatch.ends[_WARMUP_BATCHES::_WINDOW])]
    return {"microseconds_per_batch": 1e6 * statistics.median(windows) / _WINDOW}


def _built(path: str, arguments: dict[str, Any]) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"lightning_speedkit.optimize.{module}"), name)(**arguments)


def variants(batches: int) -> list[Variant]:
    """The three callbacks together and each alone, on windows of 4 batches; and the two without a factor."""

    def variant(name: str, baseline: str, ours: tuple[str, ...] = (), **trainer: Any) -> Variant:
        chosen = {path: arguments for path, arguments in _OURS.items() if path.rpartition(".")[2] in ours}
        return Variant(name, _FUNCTION, {"batches": batches, "callbacks": chosen, "trainer": trainer}, baseline)

    windows, plain = "Lightning, windows of 4", "Lightning, no window"
    accumulate = {"accumulate_grad_batches": _WINDOW}
    clip = {"gradient_clip_val": 1.0}
    return [
        variant(windows, windows, **accumulate, **clip),
        variant("Lightning again", windows, **accumulate, **clip),
        variant(
            "accumulation, clipping, guard", windows, ("AccumulationScheduler", "GradientClipping", "NonFiniteGuard")
        ),
        variant("AccumulationScheduler", windows, ("AccumulationScheduler",), **clip),
        variant("GradientClipping", windows, ("GradientClipping",), **accumulate),
        variant("NonFiniteGuard", windows, ("NonFiniteGuard",), **accumulate, **clip),
        variant("SpikeGuard", windows, ("SpikeGuard",), **accumulate, **clip),
        variant(plain, plain, **clip),
        variant("clipping, guard, no window", plain, ("GradientClipping", "NonFiniteGuard")),
    ]


def added_microseconds(content: dict[str, Any]) -> dict[str, float]:
    """By how many microseconds per batch each variant is slower than its baseline: the median over the rounds."""
    added = {}
    for name, told in content["summary"].items():
        if told["baseline"] is not None:
            runs = [round_["runs"] for round_ in content["rounds"]]
            pairs = [(run[name].get("metrics"), run[told["baseline"]].get("metrics")) for run in runs]
            differences = [a["microseconds_per_batch"] - b["microseconds_per_batch"] for a, b in pairs if a and b]
            if differences:
                added[name] = statistics.median(differences)
    return added


def main() -> None:
    """Run it from the command line."""
    arguments = benchmark_arguments("The cost per batch of accumulation, clipping and guards.", rounds=15)
    content = run_benchmark(
        "step_overhead",
        variants(batches=200 if arguments.smoke else 4000),
        rounds=arguments.rounds,
        warmup=arguments.warmup,
        results=arguments.results,
    )
    for name, microseconds in added_microseconds(content).items():
        print(f"{name}: {microseconds:+.1f} microseconds per batch")


if __name__ == "__main__":
    main()

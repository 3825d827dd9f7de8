"""What each callback costs per step, against the plain Trainer doing the same work.

The models are tiny on purpose: a cost per step that disappears in a large model is all there is to see here. Activation
checkpointing computes the forward of its blocks a second time, so most of its cost is not overhead; it is measured on a
stack of blocks of its own. QuantizeOnFitEnd works when training has ended: its cost is in ``seconds_fit_end``.

    python -m benchmarks.callback_overhead [--rounds 9] [--smoke]
"""

from __future__ import annotations

import importlib
import itertools
import statistics
import tempfile
import time
from typing import Any

from benchmarks.harness import Variant, benchmark_arguments, run_benchmark

_FUNCTION = "benchmarks.callback_overhead:measure"
_WARMUP_STEPS = 50


def measure(
    steps: int, model: str = "linear", callbacks: list[dict[str, Any]] | None = None, accumulate: int = 1
) -> dict[str, float]:
    """Train ``steps`` batches and return the median seconds per step, and the seconds from the last step to the end."""
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = x + self.layers(x)
            return out

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            blocks = [Block() for _ in range(4)] if model == "blocks" else [nn.Linear(32, 32), nn.ReLU()]
            self.net = nn.Sequential(nn.Sequential(*blocks), nn.Linear(32, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.net(x)
            return out

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

        def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
            self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    class Stopwatch(Callback):
        """From the end of one step to the end of the next: the whole loop, whatever the order of callbacks."""

        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_train_batch_end(self, *arguments: Any) -> None:
            self.ends.append(time.perf_counter())

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(steps * 8, 32), torch.randint(0, 2, (steps * 8,)))
    small = TensorDataset(data.tensors[0][:32], data.tensors[1][:32])
    stopwatch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            max_epochs=1,
            accelerator="cpu",
            devices=1,
            accumulate_grad_batches=accumulate,
            callbacks=[*map(_built, callbacks or []), stopwatch],
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        trainer.fit(Module(), DataLoader(data, batch_size=8), DataLoader(small, batch_size=8))
        end = time.perf_counter()
    # whole accumulation windows of 4, so that each time has one optimizer step in it wherever one is taken
    marks = stopwatch.ends[_WARMUP_STEPS::4]
    windows = [later - earlier for earlier, later in itertools.pairwise(marks)]
    return {"seconds_per_step": statistics.median(windows) / 4, "seconds_fit_end": end - stopwatch.ends[-1]}


def _built(callback: dict[str, Any]) -> Any:
    module, _, name = callback["class_path"].rpartition(".")
    return getattr(importlib.import_module(module), name)(**callback.get("init_args", {}))


def _with(class_path: str, **init_args: Any) -> list[dict[str, Any]]:
    return [{"class_path": f"lightning_speedkit.{class_path}", "init_args": init_args}]


def variants(steps: int) -> list[Variant]:
    """Each callback, with the plain Trainer that does the same work as its baseline."""

    def variant(name: str, baseline: str | None = None, **arguments: Any) -> Variant:
        return Variant(name, _FUNCTION, {"steps": steps, **arguments}, baseline)

    return [
        variant("plain"),
        variant("plain again"),  # what two equal runs differ by: the noise to hold the others against
        variant("RunRecorder", callbacks=_with("measure.RunRecorder")),
        variant("AccumulationScheduler(1)", callbacks=_with("optimize.AccumulationScheduler", schedule=1)),
        variant("QuantizeOnFitEnd", callbacks=_with("compress.QuantizeOnFitEnd")),
        variant("plain, accumulating 4", "plain, accumulating 4", accumulate=4),
        variant(
            "AccumulationScheduler(4)",
            "plain, accumulating 4",
            callbacks=_with("optimize.AccumulationScheduler", schedule=4),
        ),
        variant("plain blocks", "plain blocks", model="blocks"),
        variant(
            "ActivationCheckpointing", "plain blocks", model="blocks", callbacks=_with("memory.ActivationCheckpointing")
        ),
    ]


def main() -> None:
    """Run it from the command line."""
    arguments = benchmark_arguments("The cost per step of each callback.", rounds=9)
    run_benchmark(
        "callback_overhead",
        variants(steps=150 if arguments.smoke else 2000),
        baseline="plain",
        rounds=arguments.rounds,
        warmup=arguments.warmup,
        forked=arguments.smoke,
        results=arguments.results,
    )


if __name__ == "__main__":
    main()

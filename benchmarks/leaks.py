"""Whether LeakMonitor finds ten planted leaks, and keeps quiet on ten clean runs; and what it costs per step.

Each run is a process of its own that trains a small model. ``found`` is how many leaks the monitor reports, ``named``
whether what it says of the first names the culprit, ``step`` the step at which it was found. What it costs per step is
measured without a leak, over the plain Trainer, from the medians over the steps of one run each.

    python -m benchmarks.leaks [--rounds 3] [--smoke]
"""

from __future__ import annotations

import functools
import gc
import itertools
import statistics
import tempfile
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Variant, benchmark_arguments, run_benchmark

_FUNCTION = "benchmarks.leaks:measure"
_WIDTH, _BATCH = 32, 16


@dataclass
class Step:
    """What a fault may keep: of the training step in progress."""

    module: Any
    loss: Any
    output: Any
    step: int


def _kept_losses(run: Step) -> None:
    run.module.losses = getattr(run.module, "losses", [])
    run.module.losses.append(run.loss)


def _kept_outputs(run: Step) -> None:
    run.module.net.outputs = getattr(run.module.net, "outputs", [])
    run.module.net.outputs.append(run.output.detach())


def _kept_arrays(run: Step) -> None:
    run.module.arrays = getattr(run.module, "arrays", {})
    run.module.arrays[f"step {run.step}"] = run.output.detach().numpy().copy()


def _more_hooks(run: Step) -> None:
    run.module.net[0].register_forward_hook(lambda *_: None)


def _longer_graph(run: Step) -> None:
    run.module.total = getattr(run.module, "total", 0.0) + run.loss


def _metric_without_reset(run: Step) -> None:
    from torchmetrics import CatMetric

    if not hasattr(run.module, "metric"):
        run.module.metric = CatMetric()
    run.module.metric.update(run.output.detach())


def _longer_closure(run: Step) -> None:
    def before(earlier: Any, kept: Any) -> Callable[[], Any]:
        return lambda: (earlier, kept)

    run.module.callback = before(getattr(run.module, "callback", None), run.output.detach())


def _cycles(run: Step) -> None:
    class Node:
        pass

    if run.step == 0:
        gc.disable()
    one, other = Node(), Node()
    one.other, other.one, one.kept = other, one, run.output.detach()  # type: ignore[attr-defined]


@functools.cache
def _encoded(step: int) -> Any:
    import torch

    return torch.full((256,), float(step))


def _cache_by_step(run: Step) -> None:
    _encoded(run.step)


def _open_files(run: Step) -> None:
    run.module.files = getattr(run.module, "files", [])
    run.module.files.append(Path(__file__).open())  # noqa: SIM115


LEAKS: dict[str, tuple[Callable[[Step], None], str]] = {
    "list of losses with graphs": (_kept_losses, "Module.losses: .* from NllLoss.*detach"),
    "list of detached outputs": (_kept_outputs, r"Module\.net\.outputs: "),
    "dict of numpy arrays": (_kept_arrays, r"Module\.arrays: "),
    "hook registered in each step": (_more_hooks, r"Module\.net\.0\._forward_hooks.*remove\(\)"),
    "graph that goes on over steps": (_longer_graph, r"Module\.total: .*operations in the graph"),
    "metric that is never reset": (_metric_without_reset, r"Module\.metric.*value.*reset\(\)"),
    "closure over the one before": (_longer_closure, r"Module\.callback"),
    "cycles, the collector off": (_cycles, "reference cycles"),
    "cache by step": (_cache_by_step, r"_encoded, without a limit.*maxsize"),
    "files left open": (_open_files, r"Module\.files: .*TextIOWrapper.*Close"),
}


def _slow_warm_up(run: Step) -> None:
    run.module.warm = getattr(run.module, "warm", [])
    if run.step < 60:
        run.module.warm.append(run.output.detach().repeat(1, 20))


def _plateau(run: Step) -> None:
    run.module.pool = getattr(run.module, "pool", [])
    if 80 <= run.step < 150:
        run.module.pool.append(run.output.detach().repeat(1, 50))


@functools.lru_cache(maxsize=400)
def _bounded(step: int) -> Any:
    import torch

    return torch.full((256,), float(step))


def _caches_that_fill(run: Step) -> None:
    _bounded(run.step)
    run.module.cache = getattr(run.module, "cache", OrderedDict())
    run.module.cache[run.step] = run.output.detach().clone()
    if len(run.module.cache) > 50:
        run.module.cache.popitem(last=False)


def _gathered_over_the_epoch(run: Step) -> None:
    run.module.gathered = [] if run.step % run.module.steps_per_epoch == 0 else run.module.gathered
    run.module.gathered.append(run.output.detach().clone())


def _logs(run: Step) -> None:
    run.module.log("loss", run.loss, on_step=True, on_epoch=True)


def _cycles_collected(run: Step) -> None:
    one: list[Any] = [run.output.detach()]
    one.append(one)


def _nothing(run: Step) -> None:
    pass


CLEAN: dict[str, tuple[Callable[[Step], None], dict[str, Any]]] = {
    "plain": (_nothing, {}),
    "long warm-up": (_slow_warm_up, {}),
    "growth, then plateau": (_plateau, {}),
    "caches that fill": (_caches_that_fill, {}),
    "outputs of an epoch": (_gathered_over_the_epoch, {"epochs": 3}),
    "validation in between": (_nothing, {"validate": True, "epochs": 8}),
    "batches of many sizes": (_nothing, {"sizes": True}),
    "checkpoints, averages, logs": (_logs, {"everything": True, "epochs": 4}),
    "cycles, and two workers": (_cycles_collected, {"workers": 2}),
    "samples kept after reading": (_nothing, {"kept": True, "epochs": 2}),
}


def measure(case: str, steps: int = 480, monitor: bool = True, pattern: str = "") -> dict[str, float]:
    """Train with one of :data:`LEAKS` or :data:`CLEAN`, and return what the monitor found."""
    import re

    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger
    from torch import nn
    from torch.utils.data import DataLoader, Dataset, TensorDataset

    from lightning_speedkit.memory.leak_monitor import LeakMonitor
    from lightning_speedkit.optimize import AverageWeights

    fault, settings = (LEAKS[case][0], {"epochs": 2}) if case in LEAKS else CLEAN[case]
    epochs = settings.get("epochs", 1)

    class Module(LightningModule):
        steps_per_epoch = steps // epochs

        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(_WIDTH, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, _WIDTH))
            self.done = 0

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            x = batch[0][: _BATCH - self.done * 7 % 11] if settings.get("sizes") else batch[0]
            output = self.net(x)
            loss = nn.functional.cross_entropy(output, batch[1][: len(x)])
            fault(Step(self, loss, output, self.done))
            self.done += 1
            return loss

        def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
            self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    class Stopwatch(Callback):
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_train_batch_end(self, *arguments: Any) -> None:
            if not monitor or case == "plain":
                self.ends.append(time.perf_counter())

    class Kept(Dataset):  # type: ignore[type-arg]
        """Keeps what it has read."""

        def __init__(self, source: Any) -> None:
            self.source = source
            self.cache: dict[int, Any] = {}

        def __len__(self) -> int:
            return len(self.source)

        def __getitem__(self, index: int) -> Any:
            if index not in self.cache:
                self.cache[index] = [part.clone() for part in self.source[index]]
            return self.cache[index]

    torch.manual_seed(0)
    count = steps // epochs * _BATCH
    data = TensorDataset(torch.randn(count, _WIDTH), torch.randint(0, _WIDTH, (count,)))
    source = Kept(data) if settings.get("kept") else data
    loader = DataLoader(source, batch_size=_BATCH, shuffle=True, num_workers=settings.get("workers", 0))
    watching, stopwatch = LeakMonitor(), Stopwatch()
    callbacks: list[Callback] = [*([watching] if monitor else []), stopwatch]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        everything = bool(settings.get("everything"))
        if everything:
            callbacks += [AverageWeights(), ModelCheckpoint(every_n_train_steps=50)]
        validating = DataLoader(data, batch_size=_BATCH) if settings.get("validate") or everything else None
        trainer = Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            devices=1,
            callbacks=callbacks,
            default_root_dir=folder,
            logger=CSVLogger(folder) if everything else False,
            log_every_n_steps=1,
            limit_val_batches=4,
            enable_checkpointing=everything,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Module(), loader, validating)
    gc.enable()
    told = watching.leaks[0].describe() if watching.leaks else ""
    print(f"{case}: {told or 'nothing'}", flush=True)
    pairs = list(itertools.pairwise(stopwatch.ends[100:]))
    return {
        "found": float(len(watching.leaks)),
        **({"named": float(bool(re.search(pattern, told)))} if pattern else {}),
        **({"step": float(watching.leaks[0].last_step)} if watching.leaks else {}),
        **({"seconds_per_step": statistics.median(b - a for a, b in pairs)} if pairs else {}),
    }


def variants(steps: int = 480) -> list[Variant]:
    """All cases, each held against none; the two plain runs against each other."""
    leaks = [
        Variant(f"leak: {name}", _FUNCTION, {"case": name, "steps": steps, "pattern": pattern}, f"leak: {name}")
        for name, (_, pattern) in LEAKS.items()
    ]
    clean = [Variant(f"clean: {name}", _FUNCTION, {"case": name, "steps": steps}, f"clean: {name}") for name in CLEAN]
    cost = {"case": "plain", "steps": 4 * steps}
    return [
        *leaks,
        *clean,
        Variant("cost: no monitor", _FUNCTION, {**cost, "monitor": False}, "cost: no monitor"),
        Variant("cost: LeakMonitor", _FUNCTION, cost, "cost: no monitor"),
    ]


def main() -> None:
    """Run it from the command line."""
    arguments = benchmark_arguments("Planted leaks and clean runs under LeakMonitor, and its cost per step.", rounds=3)
    chosen = variants()
    if arguments.smoke:
        chosen = [each for each in chosen if each.name in ("leak: list of detached outputs", "clean: plain")]
    run_benchmark(
        "leaks",
        chosen,
        rounds=arguments.rounds,
        warmup=0,
        forked=arguments.smoke,
        results=arguments.results,
        higher_is_better=["found", "named"],
    )


if __name__ == "__main__":
    main()

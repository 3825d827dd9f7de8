"""What exact accumulation, clipping and the guards cost per batch, over Lightning's own accumulation and clipping.

The model is tiny on purpose: what does not shrink with the model is all there is to see. Each variant is held against
the Trainer that does the same work with its own arguments.

All variants train in one process, a thread for each, and take turns of 10 windows of 4 batches, in a new random order
every time. The first window of a turn is not counted: it finds the processor's caches full of another run, as no
training does. A difference is taken between turns that follow one another, so that a machine that is slower for a while
is slower for both. A turn takes the CPU time of its thread, in which all of it happens. "Lightning again" is the
baseline a second time: what it seems to add is what the measurement cannot tell. Each round of the harness is a fresh
process.

    python -m benchmarks.step_overhead [--rounds 5] [--smoke]
"""

from __future__ import annotations

import importlib
import random
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from benchmarks.harness import Variant, benchmark_arguments, run_benchmark

WINDOW = 4
TURN = 10  # windows
_WARMUP_TURNS = 3
_ACCUMULATE = {"accumulate_grad_batches": WINDOW}
_CLIP = {"gradient_clip_val": 1.0}
_OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "AccumulationScheduler": ("accumulate", {"schedule": WINDOW}),
    "GradientClipping": ("clip", {"limit": 1.0}),
    "NonFiniteGuard": ("non_finite_guard", {}),
    "SpikeGuard": ("spike_guard", {}),
}


@dataclass(frozen=True)
class Run:
    """One way to train: callbacks of the kit, and arguments of the Trainer."""

    callbacks: tuple[str, ...] = ()
    trainer: dict[str, Any] = field(default_factory=dict)
    baseline: str | None = None


_WINDOWS, _PLAIN = "Lightning, windows of 4", "Lightning, no window"
RUNS = {
    _WINDOWS: Run((), {**_ACCUMULATE, **_CLIP}),
    "Lightning again": Run((), {**_ACCUMULATE, **_CLIP}, _WINDOWS),
    "accumulation, clipping, guard": Run(("AccumulationScheduler", "GradientClipping", "NonFiniteGuard"), {}, _WINDOWS),
    "AccumulationScheduler": Run(("AccumulationScheduler",), _CLIP, _WINDOWS),
    "GradientClipping": Run(("GradientClipping",), _ACCUMULATE, _WINDOWS),
    "NonFiniteGuard": Run(("NonFiniteGuard",), {**_ACCUMULATE, **_CLIP}, _WINDOWS),
    "SpikeGuard": Run(("SpikeGuard",), {**_ACCUMULATE, **_CLIP}, _WINDOWS),
    _PLAIN: Run((), _CLIP),
    "clipping, guard, no window": Run(("GradientClipping", "NonFiniteGuard"), {}, _PLAIN),
}


class Turns:
    """Lets threads go on one at a time: each once per round, in a random order."""

    def __init__(self, members: int) -> None:
        self._random = random.Random(0)
        self._gates = [threading.Semaphore(0) for _ in range(members)]
        self._members = list(range(members))
        self._round: list[int] = []

    def next(self) -> None:
        """Let one member go on; only the one whose turn it is calls this."""
        if not self._round:
            self._round = self._random.sample(self._members, len(self._members))
        if self._round:
            self._gates[self._round.pop()].release()

    def wait(self, member: int) -> None:
        """Until it is the turn of this member."""
        self._gates[member].acquire()

    def leave(self, member: int) -> None:
        """This member is done: the others go on without it."""
        self._members.remove(member)
        if member in self._round:
            self._round.remove(member)
        self.next()


def measure(count: int) -> dict[str, float]:
    """Let each run have so many turns.

    Returns:
        For each run ``"<name>: microseconds per batch"``, the median over its turns; and ``"<name>: added"`` for those
        with a baseline, the median over the differences between the turns of both.
    """
    turns = Turns(len(RUNS))
    seconds: dict[str, list[float]] = {name: [] for name in RUNS}
    errors: list[BaseException] = []

    def train(member: int, name: str) -> None:
        turns.wait(member)
        try:
            _train(RUNS[name], count, turns, member, seconds[name])
        except BaseException as error:  # raised below, in the thread that measures
            errors.append(error)
        finally:
            turns.leave(member)

    threads = [threading.Thread(target=train, args=pair) for pair in enumerate(RUNS)]
    for thread in threads:
        thread.start()
    turns.next()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return added_microseconds({name: told[_WARMUP_TURNS:] for name, told in seconds.items()})


def added_microseconds(seconds: dict[str, list[float]]) -> dict[str, float]:
    """The numbers of :func:`measure` from the seconds of a window, in each turn of each run."""
    told = {}
    for name, own in seconds.items():
        told[f"{name}: microseconds per batch"] = 1e6 * statistics.median(own) / WINDOW
        baseline = RUNS[name].baseline
        if baseline is not None:
            differences = [a - b for a, b in zip(own, seconds[baseline], strict=True)]
            told[f"{name}: added"] = 1e6 * statistics.median(differences) / WINDOW
    return told


def _train(run: Run, count: int, turns: Turns, member: int, seconds: list[float]) -> None:
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
        """A turn starts and ends inside this hook, at the end of a window."""

        started = 0.0

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            window, inside = divmod(batch_idx + 1, WINDOW)
            if inside:
                return
            if window % TURN == 0:
                seconds.append((time.thread_time() - self.started) / (TURN - 1))
                turns.next()
                turns.wait(member)
            elif window % TURN == 1:
                self.started = time.thread_time()

    def built(name: str) -> Any:
        module, arguments = _OURS[name]
        return getattr(importlib.import_module(f"lightning_speedkit.optimize.{module}"), name)(**arguments)

    data = list(torch.randn(WINDOW * TURN * count, 8, 32))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            max_epochs=1,
            accelerator="cpu",
            devices=1,
            callbacks=[*map(built, run.callbacks), Stopwatch()],
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **run.trainer,
        )
        trainer.fit(Module(), DataLoader(data, batch_size=None))  # type: ignore[arg-type]


def main() -> None:
    """Run it from the command line."""
    arguments = benchmark_arguments("The cost per batch of accumulation, clipping and guards.")
    count = 5 if arguments.smoke else 100
    content = run_benchmark(
        "step_overhead",
        [Variant("all runs by turns", "benchmarks.step_overhead:measure", {"count": count})],
        rounds=arguments.rounds,
        warmup=0,
        forked=arguments.smoke,
        results=arguments.results,
        console=Console(quiet=True),
    )
    (summary,) = content["summary"].values()
    for error in summary["errors"]:
        print(error)
    for name, spread in summary["metrics"].items():
        sign = "+" if name.endswith(": added") else ""
        print(f"{name}: {spread['median']:{sign}.1f} ({spread['min']:{sign}.1f} to {spread['max']:{sign}.1f})")


if __name__ == "__main__":
    main()

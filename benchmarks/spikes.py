"""Whether a run with bad batches ends where the clean run ends: with guards, and without.

The protocol. It, and the defaults of the guards, were settled with seeds 100 to 104, and only then was it run with the
seeds that are reported:

- Data: the digits of the kit. 1,197 are learnt from; the other 600 are the validation set. Pixels from 0 to 1.
- Model: two hidden layers of 128, without normalization, which would divide a scaled input by its scale.
- Ten epochs in batches of 32, the rest of an epoch left out: 370 steps. The learning rate falls to 0 along a cosine.
- SGD with momentum 0.9. Its learning rate is a third of the one of 0.01, 0.03, 0.1, 0.3 and 1 with the lowest final
  loss in a clean run of seed 100: at that rate itself a few batches more or less move the final loss by as much as the
  bar of 5 %, which two rows show. AdamW with torch's default, 0.001, stands beside it.
- Faults. Spike: the batch after a third of the steps has its pixels multiplied by 1000 and its labels shuffled. NaN:
  the pixels of five batches in a row, after two thirds of the steps. Both: the two in one run. Gradient: that of the
  batch after a third of the steps is multiplied by 1000 while its loss is right, so that the loss shows the harm a step
  too late.
- Guards with their default arguments.
- Seeds 0 to 4, all reported. A seed decides the first weights, the order of the batches and the shuffled labels.
- Final loss: the mean cross-entropy over the validation set after the last step, or after the step at which a guard
  ended the run. A run is held against the clean run of the same seed and optimizer; a guarded one should end within 5 %
  of it. It has diverged if its loss is not finite, or 10 times that of the clean run.

Rows that tell where a difference comes from: guards on the clean run, which they should leave alone, and Lightning's
rule for a spike alone (``deviations=0``); the clean run without the bad batches; and a rollback that is given as many
more batches as it took back.

The numbers are in ``spikes.json``, each seed's under ``seeds``; no time is measured. ``spikes.svg``, beside it or in
``docs/pictures``, shows the training losses of seed 0.

    python -m benchmarks.spikes [--smoke]
"""

from __future__ import annotations

import json
import math
from typing import Any

from rich.console import Console

from benchmarks.bad_batches.showing import WORST, by_seed, draw, table
from benchmarks.bad_batches.training import NAN_BATCHES, train
from benchmarks.harness import RESULTS, Variant, benchmark_arguments, run_benchmark
from benchmarks.worker import ROOT
from lightning_speedkit.facts import write_json

_FUNCTION = "benchmarks.spikes:measure"
_RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
_ADAMW_RATE = 0.001
_TUNING_SEED = 100


def measure(
    epochs: int, seeds: int, optimizer: str, rate: float, guard: str, faults: str, extra: str = ""
) -> dict[str, float]:
    """For each seed ``loss_<seed>`` (at most 1e6, which also stands for NaN), and ``acted_``, ``taken_back_`` and
    ``stopped_<seed>``.

    ``extra`` is ``"left out"`` for the run without the bad batches, or ``"made up"`` for a rollback that is given as
    many more batches as it took back.
    """
    found = {}
    for seed in range(seeds):
        run = train(epochs, optimizer, rate, guard, faults, seed, left_out=extra == "left out")
        if extra == "made up":
            run = train(epochs, optimizer, rate, guard, faults, seed, more=run.taken_back)
        loss = run.final_loss if math.isfinite(run.final_loss) else WORST
        found[f"loss_{seed}"] = min(loss, WORST)
        found |= {f"{key}_{seed}": float(getattr(run, key)) for key in ("acted", "taken_back", "stopped")}
    return found


def swept(epochs: int) -> dict[float, float]:
    """The final loss of clean runs with SGD by learning rate."""
    found = {rate: train(epochs, "sgd", rate, "none", "none", _TUNING_SEED).final_loss for rate in _RATES}
    return {rate: loss if math.isfinite(loss) else WORST for rate, loss in found.items()}


def variants(epochs: int, seeds: int, best: float) -> list[Variant]:
    """All rows of the table; ``best`` is the learning rate that SGD does best with."""

    def variant(faults: str, guard: str, optimizer: str = "sgd", extra: str = "", rate: float = best / 3) -> Variant:
        what = {"none": "unguarded" if faults != "none" else "", "non-finite": "NonFiniteGuard"}.get(guard)
        if what is None:
            what = "GradientClipping zclip" if guard == "clipping" else f"SpikeGuard {guard}"
        if extra == "left out":
            what = "the bad batches left out"
        which = "AdamW" if optimizer == "adamw" else "best rate" if rate == best else ""
        told = (
            which,
            {"none": "clean", "nan": "NaN"}.get(faults, faults),
            what,
            "made up" if extra == "made up" else "",
        )
        asked: dict[str, Any] = {"epochs": epochs, "seeds": seeds, "optimizer": optimizer, "extra": extra}
        asked |= {"rate": rate if optimizer == "sgd" else _ADAMW_RATE, "guard": guard, "faults": faults}
        base = f"{which}, clean" if which else "clean"
        return Variant(", ".join(filter(None, told)), _FUNCTION, asked, baseline=base)

    found = [variant("none", guard) for guard in ("none", "non-finite", "skip", "rollback", "skip, deviations=0")]
    for faults in ("spike", "nan", "both", "gradient"):
        guards = ("none", "non-finite", "skip", "rollback") if faults == "nan" else ("none", "skip", "rollback")
        found += [variant(faults, guard) for guard in guards]
    found += [variant("both", "rollback", extra="made up"), variant("both", "none", extra="left out")]
    for faults in ("none", "spike", "both", "gradient"):
        for guard in ("none", "skip", "rollback")[: 1 if faults == "none" else 3]:
            found.append(variant(faults, guard, "adamw"))
    found.append(variant("gradient", "clipping", "adamw"))
    return [*found, variant("none", "none", rate=best), variant("both", "none", extra="left out", rate=best)]


def curves(epochs: int, rate: float) -> dict[str, dict[str, list[float]]]:
    """What is drawn, of seed 0."""
    shown = {"unguarded": "none", "SpikeGuard, rollback": "rollback", "SpikeGuard, skip": "skip"}
    panels: dict[str, dict[str, list[float]]] = {}
    titles = {"spike": "A spike", "nan": f"{NAN_BATCHES} batches of NaN", "gradient": "One gradient times 1000"}
    for faults, title in titles.items():
        asked = {**shown, "NonFiniteGuard": "non-finite"} if faults == "nan" else shown
        runs = {name: train(epochs, "sgd", rate, guard, faults, 0).losses for name, guard in asked.items()}
        panels[title] = {"clean": train(epochs, "sgd", rate, "none", "none", 0).losses, **runs}
    return panels


def main() -> None:
    """Run it from the command line."""
    import torch

    arguments = benchmark_arguments("Where runs with bad batches end.", rounds=1)
    epochs, seeds = (2, 1) if arguments.smoke else (10, 5)
    torch.set_num_threads(1)
    rates = swept(epochs)
    best = min(rates, key=lambda rate: rates[rate])
    content = run_benchmark(
        "spikes",
        variants(epochs, seeds, best),
        baseline="clean",
        rounds=1,
        warmup=0,
        in_process=True,
        results=arguments.results,
        console=Console(quiet=True),
    )
    content["learning_rates"] = {"swept": {str(rate): loss for rate, loss in rates.items()}, "sgd": best / 3}
    content["seeds"] = by_seed(content)
    path = write_json(json.dumps(content, indent=1, allow_nan=False) + "\n", arguments.results / "spikes.json")
    print(table(content["seeds"]))
    for name, told in content["summary"].items():
        print(*(f"{name}: {error}\n" for error in told["errors"]), end="")
    folder = ROOT / "docs" / "pictures" if arguments.results == RESULTS else arguments.results
    print(
        f"Learning rate of SGD: {best / 3:g}. Written: {path}, {draw(curves(epochs, best / 3), folder / 'spikes.svg')}"
    )


if __name__ == "__main__":
    main()

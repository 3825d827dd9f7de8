"""Which batch size is found under a memory limit that is known, and in how many trials: the kit and Lightning's finder.

The limit is a model that raises ``torch.OutOfMemoryError`` for more samples; there are ten limits between 1 and
``most``, the same in each round. ``wrong`` counts the limits whose largest size was not returned, ``over budget`` those
that took more than ``2 log2(most) + 2`` trials. Lightning's finder is run in its mode that bisects.

    python -m benchmarks.batch_size_search [--rounds 5] [--smoke]
"""

from __future__ import annotations

import math
import random
import time
from typing import Any

from benchmarks.harness import Variant, benchmark_arguments, run_benchmark

_FUNCTION = "benchmarks.batch_size_search:measure"


def measure(way: str, limits: int, most: int) -> dict[str, float]:
    """Search under each limit; ``way`` is ``"kit"`` or ``"lightning"``."""
    import logging
    import warnings

    import torch
    from lightning.pytorch import LightningDataModule, LightningModule, Trainer
    from lightning.pytorch.callbacks import BatchSizeFinder
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_speedkit.memory.batch_size import BatchSizeSearch

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")

    class Scarce(LightningModule):
        def __init__(self, limit: int) -> None:
            super().__init__()
            self.net, self.limit, self.sizes = torch.nn.Linear(2, 1), limit, set[int]()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            tried.append(len(batch[0]))
            if len(batch[0]) > self.limit:
                raise torch.OutOfMemoryError("out of memory")
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    class Data(LightningDataModule):
        batch_size = 2

        def train_dataloader(self) -> Any:
            return DataLoader(TensorDataset(torch.ones(2 * most, 2)), batch_size=self.batch_size)

    known = random.Random(0).sample(range(1, most + 1), limits)
    wrong = over = failed = 0
    trials, begin = list[int](), time.perf_counter()
    for limit in known:
        tried: list[int] = []
        data = Data()
        if way == "kit":
            search: Any = BatchSizeSearch(limit=most)
        else:
            search = BatchSizeFinder(mode="binsearch", max_trials=100, max_val=most)
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_steps": 0}
        trainer = Trainer(accelerator="cpu", callbacks=[search], enable_model_summary=False, **quiet)  # type: ignore[arg-type]
        try:
            trainer.fit(Scarce(limit), data)
        except Exception:
            failed += 1
        wrong += data.batch_size != limit
        changes = [size for place, size in enumerate(tried) if place == 0 or size != tried[place - 1]]
        trials.append(len(changes))
        over += len(changes) > 2 * math.log2(most) + 2
    return {
        "wrong": wrong,
        "over budget": over,
        "raised": failed,
        "most trials": max(trials),
        "seconds per search": (time.perf_counter() - begin) / limits,
    }


def main() -> None:
    """Measure and write the results."""
    options = benchmark_arguments("The batch size found under known limits.", 5)
    size = {"limits": 2, "most": 64} if options.smoke else {"limits": 10, "most": 1024}
    run_benchmark(
        "batch_size_search",
        [
            Variant("kit", _FUNCTION, {"way": "kit", **size}),
            Variant("Lightning", _FUNCTION, {"way": "lightning", **size}),
        ],
        baseline="Lightning",
        rounds=options.rounds,
        warmup=options.warmup,
        forked=options.smoke,
        results=options.results,
    )


if __name__ == "__main__":
    main()

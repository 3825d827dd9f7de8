"""What suggest_loader chooses for three kinds of samples, against no workers and against one worker per core.

"suggested" is measured with the settings that :func:`~lightning_speedkit.data.suggest_loader` finds in the same
process; the time of the search is beside it and not in the rate. Rates are of whole passes with workers that run
already, without a model.

    python -m benchmarks.suggest_loader [--rounds 5] [--smoke]
"""

from __future__ import annotations

import io
import time
from typing import Any

from benchmarks.harness import Variant, benchmark_arguments, run_benchmark

_FUNCTION = "benchmarks.suggest_loader:measure"
KINDS = ("tensors", "pictures", "waiting")
BATCH_SIZE = 32


def measure(kind: str, settings: str, seconds: float, search: float) -> dict[str, float]:
    """Samples per second of a DataLoader over samples of that kind, with these settings; ``search`` is in seconds."""
    from torch.utils.data import DataLoader

    from lightning_speedkit.data.loading.loader_speed import measure_loader
    from lightning_speedkit.data.settings.suggest_loader import suggest_loader
    from lightning_speedkit.measure import read_hardware

    dataset, hardware = _dataset(kind), read_hardware("cpu")
    seconds_search = 0.0
    if settings == "suggested":
        start = time.perf_counter()
        arguments = suggest_loader(hardware, dataset, batch_size=BATCH_SIZE, seconds=search).arguments()
        seconds_search = time.perf_counter() - start
    else:
        workers = 0 if settings == "none" else hardware.cpu_count
        arguments = {"num_workers": workers, "persistent_workers": workers > 0}
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True, **arguments)
    speed = measure_loader(loader, seconds=seconds).warm
    return {
        "samples_per_second": speed.samples_per_second,
        "workers": float(arguments["num_workers"]),
        "seconds_search": seconds_search,
    }


def _dataset(kind: str) -> Any:
    import torch
    from torch.utils.data import Dataset, TensorDataset

    if kind == "tensors":
        return TensorDataset(torch.zeros(4096, 3, 64, 64, dtype=torch.uint8), torch.arange(4096))

    class Pictures(Dataset[Any]):
        """Crops of two photographs, decoded and resized by Pillow."""

        def __init__(self) -> None:
            from PIL import Image
            from sklearn.datasets import load_sample_images

            self.files = []
            for photograph in load_sample_images().images:
                for top in range(0, 128, 16):
                    file = io.BytesIO()
                    Image.fromarray(photograph[top : top + 256, 100:420]).save(file, "JPEG", quality=90)
                    self.files.append(file.getvalue())

        def __len__(self) -> int:
            return 512

        def __getitem__(self, index: int) -> Any:
            import numpy as np
            from PIL import Image

            picture = Image.open(io.BytesIO(self.files[index % len(self.files)])).resize((224, 224))
            return torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1)

    class Waiting(Dataset[Any]):
        """Samples that come 2 ms after they were asked for, as over a network."""

        def __len__(self) -> int:
            return 512

        def __getitem__(self, index: int) -> int:
            time.sleep(0.002)
            return index

    return Pictures() if kind == "pictures" else Waiting()


def variants(seconds: float, search: float) -> list[Variant]:
    """Each kind without workers, with one per core, and as suggested."""
    return [
        Variant(
            f"{kind}, {settings}",
            _FUNCTION,
            {"kind": kind, "settings": settings, "seconds": seconds, "search": search},
            f"{kind}, none",
        )
        for kind in KINDS
        for settings in ("none", "one per core", "suggested")
    ]


def main() -> None:
    """Run it from the command line."""
    arguments = benchmark_arguments("DataLoader settings as suggested.", rounds=5)
    run_benchmark(
        "suggest_loader",
        variants(*((0.05, 0.1) if arguments.smoke else (3.0, 5.0))),
        baseline="tensors, none",
        rounds=arguments.rounds,
        warmup=arguments.warmup,
        forked=arguments.smoke,
        higher_is_better=("samples_per_second",),
        results=arguments.results,
    )


if __name__ == "__main__":
    main()

"""The demo's trainings, repeated: from image files, with two workers, from LMDB, and from LMDB with a preset bundle.

    python -m benchmarks.demo_before_after

Every run is a process of its own. It makes its image files and stores anew, trains one epoch unmeasured, and then
trains the demo's model with the demo's settings. Torch uses as many threads as it would for a user. Files and stores
have just been written, so all reads come from the page cache.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.harness import Variant, benchmark_arguments, run_benchmark
from lightning_speedkit.demo.digits import write_image_folder
from lightning_speedkit.demo.results import TrainingResult
from lightning_speedkit.demo.runs import (
    DigitsDataModule,
    TrainingSettings,
    bundle_for,
    new_model,
    pack,
    train_from_files,
    train_from_store,
)
from lightning_speedkit.measure import read_hardware

WAYS = ("files", "files, 2 workers", "LMDB", "LMDB + bundle")


def train(way: str, epochs: int, limit: int | None = None) -> dict[str, float]:
    """Trains one way and returns its rates; ``limit`` takes that many images per split."""
    settings = TrainingSettings(epochs=epochs, batch_size=16 if limit else 64)
    with tempfile.TemporaryDirectory() as folder:
        images = str(Path(folder, "images"))
        write_image_folder(images, limit=limit)
        data = DigitsDataModule(str(Path(folder, "stores")), images, settings.batch_size, settings.seed)
        pack(data)
        _train(way, images, data, replace(settings, epochs=1))
        result = _train(way, images, data, settings)
    timing = result.timing
    return {
        "samples_per_second": timing.samples_per_second,
        "seconds_per_step": timing.seconds_per_step,
        "seconds_data_per_step": timing.seconds_data / timing.steps,
        "seconds_compute_per_step": timing.seconds_compute / timing.steps,
        "seconds_fit": result.seconds_fit,
        "test_accuracy": result.test_accuracy,
    }


def _train(way: str, images: str, data: DigitsDataModule, settings: TrainingSettings) -> TrainingResult:
    model = new_model(settings.seed)
    if way.startswith("files"):
        return train_from_files(model, images, settings, num_workers=0 if way == "files" else 2)
    presets = (bundle_for(read_hardware()),) if way == "LMDB + bundle" else ()
    return train_from_store(model, data, settings, presets=presets)


def main() -> None:
    arguments = benchmark_arguments("The demo's trainings, repeated in alternating order.")
    settings = {"epochs": 2, "limit": 96} if arguments.smoke else {"epochs": TrainingSettings().epochs}
    run_benchmark(
        "demo_before_after",
        [Variant(way, "benchmarks.demo_before_after:train", {"way": way, **settings}) for way in WAYS],
        baseline="files",
        rounds=arguments.rounds,
        warmup=arguments.warmup,
        forked=arguments.smoke,
        higher_is_better=["samples_per_second", "test_accuracy"],
        environment={"OMP_NUM_THREADS": "1" if arguments.smoke else str(read_hardware("cpu").cpu_count)},
        results=arguments.results,
    )


if __name__ == "__main__":
    main()

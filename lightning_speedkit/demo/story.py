"""What the demo found, told from its numbers: as a page, and shorter in the terminal.

Every sentence that depends on an outcome is chosen by that outcome. A loss is told as a loss.
"""

from __future__ import annotations

from lightning_speedkit.demo.results import DemoResults, Latency, TrainingResult
from lightning_speedkit.report import (
    Bar,
    BarChart,
    Block,
    Definitions,
    Document,
    Highlight,
    Highlights,
    Section,
    Table,
    Text,
    format_number,
    ratio_text,
)

__all__ = ["demo_document", "demo_summary"]

_TITLE = "Handwritten digits, before and after"
_DISTURBED = 1.15
_QUICK = Text(
    "This was a quick run of a few steps: it shows that everything works. Its times and accuracies mean nothing.",
    tone="warning",
)


def demo_document(results: DemoResults) -> Document:
    """The whole story with its charts."""
    return Document(
        title=_TITLE,
        lead=(
            "One small convolutional network, the same first weights, the same images in the same order, the same "
            f"number of steps: trained the usual way, and with lightning_speedkit. All numbers were measured in this "
            f"run on {results.hardware.describe()}."
        ),
        opening=[*_warnings(results), _highlights(results)],
        sections=[
            Section("Time per step", _speed(results)),
            Section("Accuracy", _accuracy(results)),
            Section("On disk", _disk(results)),
            Section("Quantized to int8", _quantization(results)),
            Section("On a GPU", [Text(_gpu_text(results))]),
            Section("Use it in your training", [Text(text) for text in _advice(results)]),
            Section("How it was measured", _method(results)),
        ],
        footer=(
            "Data: Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, UCI Machine Learning "
            "Repository, 1998, https://doi.org/10.24432/C50P49, licensed under CC BY 4.0; enlarged for this demo."
        ),
    )


def demo_summary(results: DemoResults) -> Document:
    """The tables and verdicts, for the terminal."""
    return Document(
        title=_TITLE,
        lead=f"Measured on {results.hardware.describe()}.",
        opening=_warnings(results),
        sections=[
            Section(
                "Training",
                [
                    _training_table(results),
                    _step_chart(results),
                    Text(_speed_text(results)),
                    Text(_accuracy_text(results)),
                ],
            ),
            Section("On disk", [_disk_table(results), Text(_disk_text(results))]),
            Section("Quantized to int8", _quantization(results, charts=False)),
            Section("On a GPU", [Text(_gpu_text(results))]),
        ],
    )


def _highlights(results: DemoResults) -> Highlights:
    before, after = results.trainings[0], results.trainings[-1]
    rates = before.timing.samples_per_second, after.timing.samples_per_second
    items = [
        Highlight(
            f"{rates[1] / rates[0]:.2f}×",
            "samples per second",
            f"{format_number(rates[1])}, was {format_number(rates[0])}; {_apart(results)}",
        ),
        Highlight(_ms(_data(after)), "waiting for data per step", f"was {_ms(_data(before))}"),
    ]
    if _disturbance(results) is not None:
        items = [Highlight("–", "samples per second", f"not comparable in this run; {_apart(results)}")]
    int8 = results.quantization
    if int8.kept:
        told = f"was {_kib(int8.bytes_float)}; test accuracy {_percent(int8.test_accuracy_int8)}"
        items.append(Highlight(_kib(int8.bytes_int8), "model in int8", told))
    return Highlights(items)


def _apart(results: DemoResults) -> str:
    """How far the accuracies of the first and the last training are from each other, in images."""
    before, after = results.trainings[0].test_accuracy, results.trainings[-1].test_accuracy
    images = round(abs(after - before) * results.samples["test"])
    told = f", {images} of {results.samples['test']} images apart" if images else ""
    return f"test accuracy {_percent(after)} and {_percent(before)}{told}"


def _disturbance(results: DemoResults) -> tuple[float, float] | None:
    """The times per step of one computation in two trainings if they differ too much; the lower one first."""
    files, _, store, _ = results.trainings
    low, high = sorted((_compute(files), _compute(store)))
    return None if results.quick or high <= _DISTURBED * low else (low, high)


def _speed(results: DemoResults) -> list[Block]:
    runs = results.trainings
    rates = BarChart(
        "Samples per second",
        [Bar(run.name, run.timing.samples_per_second) for run in runs],
        baseline=runs[0].name,
        better="higher",
    )
    about = Definitions([(run.name, f"{run.description}; {run.precision}") for run in runs])
    return [Text(_speed_text(results)), _step_chart(results), rates, _training_table(results), about]


def _warnings(results: DemoResults) -> list[Block]:
    """What takes the meaning from the numbers: a quick run, or a computation that took longer in one training."""
    if results.quick:
        return [_QUICK]
    times = _disturbance(results)
    if times is None:
        return []
    return [
        Text(
            f"Other work disturbed this run: the same computation took {_ms(times[1])} per step in one training and "
            f"{_ms(times[0])} in another. Repeat it on a quiet machine before you compare speeds, also those of int8.",
            tone="warning",
        )
    ]


def _step_chart(results: DemoResults) -> BarChart:
    return BarChart(
        "Time per step",
        [Bar(run.name, (_data(run) * 1e3, _compute(run) * 1e3, _other(run) * 1e3)) for run in results.trainings],
        unit="ms",
        parts=("waiting for data", "computing", "other"),
        baseline=results.trainings[0].name,
    )


def _speed_text(results: DemoResults) -> str:
    files, workers, store, tuned = results.trainings
    return (
        f"From the LMDB store a step waited {_ms(_data(store))} for its batch, from single files {_ms(_data(files))}: "
        f"{_versus(store, files)}. Two worker processes on the files, which take cores of their own: "
        f"{_versus(workers, files)}. The preset {results.bundle} chose precision {tuned.precision}; its steps computed "
        f"for {_ms(_compute(tuned))}, those in {store.precision} for {_ms(_compute(store))}. Together: "
        f"{_versus(tuned, files)}."
    )


def _versus(run: TrainingResult, baseline: TrainingResult) -> str:
    rate = run.timing.samples_per_second
    factor, word = ratio_text(rate / baseline.timing.samples_per_second, "the speed of files", "slower than files")
    verdict = "as fast as files" if word == "the same" else f"{factor} {word}"
    return f"{format_number(rate)} samples per second, {verdict}"


def _training_table(results: DemoResults) -> Table:
    return Table(
        ["training", "samples/s", "ms/step", "data wait", "compute", "accuracy"],
        [
            [
                run.name,
                format_number(run.timing.samples_per_second),
                f"{run.timing.seconds_per_step * 1e3:.1f}",
                f"{_data(run) * 1e3:.1f}",
                f"{_compute(run) * 1e3:.1f}",
                _percent(run.test_accuracy),
            ]
            for run in results.trainings
        ],
    )


def _accuracy(results: DemoResults) -> list[Block]:
    bars = [Bar(run.name, run.test_accuracy * 100) for run in results.trainings]
    return [Text(_accuracy_text(results)), BarChart("Test accuracy", bars, unit="%", better="higher")]


def _accuracy_text(results: DemoResults) -> str:
    files, _, store, _ = results.trainings
    accuracies = [run.test_accuracy for run in results.trainings]
    points = (max(accuracies) - min(accuracies)) * 100
    if store.weights_digest == files.weights_digest:
        weights = "Training from LMDB ended with bit for bit the weights of training from files."
    else:
        weights = "The weights after training from LMDB and from files differ in their last bits or more."
    if points == 0.0:
        return f"{weights} The test accuracies of all four trainings are equal."
    if points <= 1.0:
        return f"{weights} The test accuracies of all four trainings lie within {points:.2f} points."
    return f"{weights} The test accuracies lie {points:.2f} points apart, more than the one point that chance explains."


def _disk(results: DemoResults) -> list[Block]:
    disk = results.disk
    chart = BarChart(
        "Bytes on disk",
        [
            Bar("PNG files, their bytes", disk.file_bytes / 2**20),
            Bar("PNG files, as allocated", disk.file_allocated_bytes / 2**20),
            Bar("decoded images and labels", disk.payload_bytes / 2**20),
            Bar("LMDB stores", disk.store_bytes / 2**20),
        ],
        unit="MiB",
    )
    return [Text(_disk_text(results)), chart, _disk_table(results)]


def _disk_text(results: DemoResults) -> str:
    disk = results.disk
    factor = disk.store_bytes / disk.file_bytes
    size = f"{factor:.2f} times the bytes of the compressed files" if factor >= 1 else "less than the compressed files"
    return (
        f"The stores keep the pixels decoded: {disk.store_overhead:.3f} times the bare pixels and labels, and {size}. "
        f"That space buys the time that decoding took. Packing took {disk.seconds_packing:.1f} s, once."
    )


def _disk_table(results: DemoResults) -> Table:
    disk = results.disk
    return Table(
        ["form", "files", "bytes", "bytes per image"],
        [
            [name, files, format_number(size), format_number(round(size / disk.files))]
            for name, files, size in (
                ("PNG files, their bytes", format_number(disk.files), disk.file_bytes),
                ("PNG files, as allocated", format_number(disk.files), disk.file_allocated_bytes),
                ("decoded images and labels", "–", disk.payload_bytes),
                ("LMDB stores", str(len(results.samples)), disk.store_bytes),
            )
        ],
    )


def _quantization(results: DemoResults, charts: bool = True) -> list[Block]:
    int8 = results.quantization
    if not int8.kept:
        return [Text(f"There is no int8 model: {int8.reason}", tone="warning")]
    text = (
        f"QuantizeOnFitEnd quantized {int8.layers_quantized} of {int8.layers_total} layers of the last model when its "
        f"training ended ({int8.backend}). {' '.join(map(_latency_text, int8.latencies))} "
        f"Of the test images the float model told {_percent(int8.test_accuracy_float)} right, the int8 model "
        f"{_percent(int8.test_accuracy_int8)}. The float model is unchanged."
    )
    rows = [
        ["size on disk", _kib(int8.bytes_float), _kib(int8.bytes_int8)],
        *([f"batch of {n.batch_size}", _ms(n.seconds_float), _ms(n.seconds_int8)] for n in int8.latencies),
        ["test accuracy", _percent(int8.test_accuracy_float), _percent(int8.test_accuracy_int8)],
    ]
    table = Table(["model", "float32", "int8"], rows)
    if not charts:
        return [table, Text(text)]
    size = BarChart(
        "Size of the model",
        [Bar("float32", int8.bytes_float / 1024), Bar("int8", int8.bytes_int8 / 1024)],
        unit="KiB",
        baseline="float32",
        gain="smaller",
        loss="larger",
    )
    times = [
        BarChart(
            f"Latency, batch of {n.batch_size}",
            [Bar("float32", n.seconds_float * 1e3), Bar("int8", n.seconds_int8 * 1e3)],
            unit="ms",
            baseline="float32",
        )
        for n in int8.latencies
    ]
    return [Text(text), size, *times, table]


def _latency_text(latency: Latency) -> str:
    factor, word = ratio_text(latency.speedup, "faster", "slower")
    verdict = "as fast as float32" if word == "the same" else f"{factor} {word} than float32"
    return f"In batches of {latency.batch_size} it is {verdict}."


def _gpu_text(results: DemoResults) -> str:
    if results.bundle != "cpu":
        return (
            f"This run used a GPU with the preset {results.bundle}: one device, mixed precision in the format that "
            "it computes natively, cuDNN's autotuner. Batches cross to the device as uint8, a quarter of the bytes "
            "of floats, and become floats there. int8 was timed on the CPU. Several GPUs would share the work under "
            "the preset multi-gpu; these images are too few for that."
        )
    return (
        "There is none here. On one, the demo takes the preset single-gpu instead of cpu: mixed precision in the "
        "format that the GPU computes natively, and cuDNN's autotuner. Batches cross to it as uint8, a quarter of the "
        "bytes of floats, and become floats there. A GPU computes a step in less time, so that the wait for data is a "
        "larger part of it. int8 stays on the CPU."
    )


def _advice(results: DemoResults) -> list[str]:
    return [
        "Subclass LMDBDataModule and return your samples from samples(split): the stores are packed once, at the "
        "first fit.",
        f'Trainer(**trainer_kwargs("{results.bundle}", max_epochs={results.epochs})) is the Trainer of the last '
        "training; QuantizeOnFitEnd() in its callbacks gives the int8 model. Your LightningModule stays as it is.",
    ]


def _method(results: DemoResults) -> list[Block]:
    samples = ", ".join(f"{count} {split}" for split, count in results.samples.items())
    ran = "once" if results.rounds == 1 else "twice, the second time in reverse order, and the faster run is shown"
    text = (
        f"In this process, after an unmeasured epoch of both kinds, each training ran {ran}. The "
        "first steps of every epoch, validation and the work around epochs are not in the time per step. Data wait is "
        "the time until the next batch is ready on its device. All files had just been written, so every read came "
        "from the page cache; a cold disk is another matter. Runs differ by some percent: the benchmark "
        "demo_before_after in the source repository repeats them in alternating order."
    )
    facts = [
        ("images", f"{samples}; {results.image_size} by {results.image_size} grey pixels"),
        ("training", f"{results.epochs} epochs in batches of {results.batch_size}, AdamW, seed {results.seed}"),
        ("machine", results.hardware.describe()),
        ("versions", ", ".join(f"{name} {version}" for name, version in results.versions.items())),
        ("whole demo", f"{results.seconds_total:.0f} s after Python and its libraries were loaded"),
    ]
    return [Text(text), Definitions(facts)]


def _data(run: TrainingResult) -> float:
    return run.timing.seconds_data / run.timing.steps


def _compute(run: TrainingResult) -> float:
    return run.timing.seconds_compute / run.timing.steps


def _other(run: TrainingResult) -> float:
    return run.timing.seconds_other / run.timing.steps


def _ms(seconds: float) -> str:
    return format_number(seconds * 1e3, "ms")


def _kib(size: float) -> str:
    return format_number(size / 1024, "KiB")


def _percent(share: float) -> str:
    return f"{share * 100:.2f} %"

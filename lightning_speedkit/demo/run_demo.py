"""Runs the demo from the first image to the report: the work behind ``speedkit demo``."""

from __future__ import annotations

import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn

from lightning_speedkit.compress import QuantizeOnFitEnd
from lightning_speedkit.demo.digits import (
    IMAGE_SIZE,
    SPLITS,
    disk_use,
    payload_bytes,
    split_indices,
    to_network_input,
    write_image_folder,
)
from lightning_speedkit.demo.model import DigitNet
from lightning_speedkit.demo.results import DemoResults, DiskResult, Latency, QuantizationResult, TrainingResult
from lightning_speedkit.demo.runs import (
    DigitsDataModule,
    TrainingSettings,
    bundle_for,
    new_model,
    pack,
    train_from_files,
    train_from_store,
)
from lightning_speedkit.demo.story import demo_document, demo_summary
from lightning_speedkit.errors import MissingExtraError
from lightning_speedkit.facts import write_json
from lightning_speedkit.measure import read_hardware, read_versions

__all__ = ["run_demo"]

_QUICK_LIMIT = 96  # images per split
_SECOND_ROUND_BEFORE = 40.0  # seconds; a slow machine has one round, so that the demo stays under two minutes
_LIGHTNING_LOGGER = "lightning.pytorch.utilities.rank_zero"
_Tick = Callable[[], None]


def run_demo(
    out: str = "speedkit-demo",
    *,
    quick: bool = False,
    seed: int = 0,
    keep_files: bool = False,
    console: Console | None = None,
) -> DemoResults:
    """Trains on real digits the usual way and with the kit, quantizes, and writes what it measured.

    Works offline. Everything but the report is made in a temporary folder and removed, also when the run is stopped.

    Args:
        out: The folder for ``report.html`` and ``results.json``. Files of these names are replaced, others left alone.
        quick: A few steps on a few images: shows that everything runs, and measures nothing worth reading.
        seed: Decides the first weights and the order of the images.
        keep_files: Keep the images, the stores and the quantized model in a new folder inside ``out``.
        console: Where progress and results are printed; standard output if ``None``.

    Returns:
        All the numbers of the report.
    """
    _require_libraries()
    started = time.perf_counter()
    console = console or Console()
    folder = Path(out)
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _workspace(folder, keep_files) as work, _quiet_lightning(), _progress(console) as progress:
            results = _measure(work, quick, seed, progress)
        results = replace(results, seconds_total=time.perf_counter() - started)
        write_json(results.to_json(), folder / "results.json")
        demo_document(results).write_html(folder / "report.html")
    except BaseException:
        if made and not any(folder.iterdir()):
            folder.rmdir()
        raise
    demo_summary(results).print(console)
    console.print(f"\nReport: {folder / 'report.html'}\nNumbers: {folder / 'results.json'}", soft_wrap=True)
    if keep_files:
        console.print(f"Images, stores and model: {work}", soft_wrap=True)
    return results


def _measure(work: Path, quick: bool, seed: int, progress: _Phases) -> DemoResults:
    started = time.perf_counter()
    limit = _QUICK_LIMIT if quick else None
    settings = TrainingSettings(seed=seed, epochs=2, batch_size=16) if quick else TrainingSettings(seed=seed)
    samples = {split: len(split_indices(split)[:limit]) for split in SPLITS}
    images, stores = str(work / "images"), str(work / "stores")
    hardware = read_hardware()

    with progress.phase("Writing the digits as image files", sum(samples.values())) as tick:
        write_image_folder(images, limit=limit, advance=tick)
    data = DigitsDataModule(stores, images, settings.batch_size, settings.seed)
    with progress.phase("Packing them into LMDB stores", sum(samples.values())) as tick:
        seconds_packing = pack(data, advance=tick)
    disk = _measure_disk(images, stores, seconds_packing)

    ways = _Ways(images, data, settings, bundle_for(hardware), str(work / "quantized"), quick)
    with progress.phase("Warming up, not measured", 1) as tick:
        ways.warm_up()
        tick()
    steps = settings.epochs * -(-samples["train"] // settings.batch_size)
    rounds = [_train_all(ways, steps, progress, "")]
    if not quick and time.perf_counter() - started < _SECOND_ROUND_BEFORE:
        rounds.append(_train_all(ways, steps, progress, ", again")[::-1])
    return DemoResults(
        hardware=hardware,
        versions=read_versions(),
        quick=quick,
        seed=seed,
        epochs=settings.epochs,
        batch_size=settings.batch_size,
        image_size=IMAGE_SIZE,
        samples=samples,
        bundle=ways.bundle,
        disk=disk,
        rounds=len(rounds),
        trainings=tuple(min(same, key=_seconds_per_step) for same in zip(*rounds, strict=True)),
        quantization=ways.quantization,
        seconds_total=0.0,
    )


class _Ways:
    """The four trainings, in the order of the report, each with what it needs."""

    def __init__(
        self, images: str, data: DigitsDataModule, settings: TrainingSettings, bundle: str, folder: str, quick: bool
    ) -> None:
        self.images, self.data, self.settings, self.bundle = images, data, settings, bundle
        self.quantization = QuantizationResult(kept=False, reason="it was not made.")
        # a model that has hardly trained answers by chance, so that a tolerance would decide by chance too
        self._quantize = QuantizeOnFitEnd(
            backend="torch-ao-static", objective="size", max_metric_drop=1.0 if quick else 0.01, folder=folder
        )

    def titled(self) -> list[tuple[str, Callable[[_Tick], TrainingResult]]]:
        return [
            ("Training from files", self._from_files),
            ("Training from files, two workers", self._from_files_with_workers),
            ("Training from LMDB", self._from_store),
            (f"Training from LMDB, preset {self.bundle}, then int8", self._from_store_with_bundle),
        ]

    def warm_up(self) -> None:
        """One epoch each way, so that no measured training pays for the first use of a kernel or a library."""
        once = replace(self.settings, epochs=1)
        train_from_files(new_model(0), self.images, once)
        train_from_store(new_model(0), self.data, once, presets=(self.bundle,))

    def _from_files(self, tick: _Tick) -> TrainingResult:
        return train_from_files(new_model(self.settings.seed), self.images, self.settings, tick=tick)

    def _from_files_with_workers(self, tick: _Tick) -> TrainingResult:
        return train_from_files(new_model(self.settings.seed), self.images, self.settings, num_workers=2, tick=tick)

    def _from_store(self, tick: _Tick) -> TrainingResult:
        return train_from_store(new_model(self.settings.seed), self.data, self.settings, tick=tick)

    def _from_store_with_bundle(self, tick: _Tick) -> TrainingResult:
        model = new_model(self.settings.seed)
        result = train_from_store(
            model, self.data, self.settings, presets=(self.bundle,), callbacks=[self._quantize], tick=tick
        )
        self.quantization = _quantization(self._quantize, model, self.data)
        return result


def _train_all(ways: _Ways, steps: int, progress: _Phases, note: str) -> list[TrainingResult]:
    """Every way once; in a second round backwards, so that a machine that grows slower treats them alike."""
    results = []
    for title, train in reversed(ways.titled()) if note else ways.titled():
        with progress.phase(title + note, steps) as tick:
            results.append(train(tick))
    return results


def _seconds_per_step(result: TrainingResult) -> float:
    return result.timing.seconds_per_step


def _measure_disk(images: str, stores: str, seconds_packing: float) -> DiskResult:
    files = disk_use(images)
    return DiskResult(
        files=files.files,
        file_bytes=files.apparent_bytes,
        file_allocated_bytes=files.allocated_bytes,
        payload_bytes=sum(payload_bytes(Path(images, split)) for split in SPLITS),
        store_bytes=sum(Path(stores, f"{split}.lmdb").stat().st_size for split in SPLITS),
        seconds_packing=seconds_packing,
    )


def _quantization(quantize: QuantizeOnFitEnd, model: DigitNet, data: DigitsDataModule) -> QuantizationResult:
    report, int8 = quantize.report, quantize.quantized_model
    if report is None or int8 is None:
        return QuantizationResult(kept=False, reason="it was not made" if report is None else report.reason)
    measured = (
        (1, report.seconds_before_one, report.seconds_after_one),
        (report.batch_size, report.seconds_before_batch, report.seconds_after_batch),
    )
    return QuantizationResult(
        kept=True,
        reason=report.reason,
        backend=report.backend or "",
        layers_quantized=len(report.layers_quantized),
        layers_total=report.layers_total,
        bytes_float=report.bytes_before or 0,
        bytes_int8=report.bytes_after or 0,
        latencies=tuple(
            Latency(batch_size=size, seconds_float=before, seconds_int8=after)
            for size, before, after in measured
            if size and before and after
        ),
        test_accuracy_float=_test_accuracy(model, data),
        test_accuracy_int8=_test_accuracy(int8, data),
    )


def _test_accuracy(model: nn.Module, data: DigitsDataModule) -> float:
    """The share of the test images that the model tells right, on the CPU and in the precision of its weights."""
    was_training, right, seen = model.training, 0, 0
    model.eval()
    with torch.no_grad():
        for images, labels in data.test_dataloader():
            right += int((model(to_network_input(images)).argmax(dim=1) == labels).sum())
            seen += len(labels)
    model.train(was_training)
    return right / seen


class _Phases:
    """A line per phase on the console, each with its own bar."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    @contextmanager
    def phase(self, title: str, total: int) -> Iterator[Callable[[], None]]:
        """Gives the function that moves the bar by one."""
        task = self._progress.add_task(title, total=total)

        def tick() -> None:
            self._progress.advance(task)

        yield tick
        self._progress.update(task, completed=total)


@contextmanager
def _progress(console: Console) -> Iterator[_Phases]:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        yield _Phases(progress)


@contextmanager
def _workspace(out: Path, keep: bool) -> Iterator[Path]:
    if keep:
        yield Path(tempfile.mkdtemp(prefix="files-", dir=out))
        return
    with tempfile.TemporaryDirectory(prefix="speedkit-demo-") as work:
        yield Path(work)


@contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Holds back what Lightning says about every Trainer, which the demo makes many of."""

    def warnings_only(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING

    logger = logging.getLogger(_LIGHTNING_LOGGER)
    logger.addFilter(warnings_only)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*does not have many workers.*")
            warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated.*")  # Lightning's own, on torch 2.13
            yield
    finally:
        logger.removeFilter(warnings_only)


def _require_libraries() -> None:
    for library, module in (("pillow", "PIL"), ("jinja2", "jinja2"), ("matplotlib", "matplotlib")):
        if find_spec(module) is None:
            raise MissingExtraError("the demo", extra="demo", library=library)

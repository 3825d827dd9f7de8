"""The trainings that the demo compares: one model, one seed, one number of steps, and different ways around them.

Every training starts from the same weights and sees the same images in the same order. In float32 on a CPU, training
from the store therefore ends with bit for bit the weights of training from the files; what differs is the time.
"""

from __future__ import annotations

import hashlib
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from typing_extensions import override

from lightning_speedkit.data import LMDBDataModule, write_lmdb
from lightning_speedkit.demo.digits import SPLITS, DigitFiles, decoded_samples, to_network_input
from lightning_speedkit.demo.model import DigitNet
from lightning_speedkit.demo.results import TrainingResult
from lightning_speedkit.facts import Hardware
from lightning_speedkit.measure import RunRecorder
from lightning_speedkit.presets import trainer_kwargs

__all__ = [
    "DigitsDataModule",
    "TrainingSettings",
    "bundle_for",
    "new_model",
    "pack",
    "train_from_files",
    "train_from_store",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """What all trainings share."""

    seed: int = 0
    epochs: int = 8
    batch_size: int = 64


class DigitsDataModule(LMDBDataModule):
    """The digits from LMDB stores, packed from a folder of images when they are not there yet.

    A store keeps the decoded pixels as uint8, a quarter of their size as floats. They become floats as a whole batch,
    on the device, instead of one by one in Python.

    Args:
        root: The folder of the stores, ``root/train.lmdb`` and so on.
        images: The folder of the image files, with a folder per split.
        batch_size: Images per batch.
        seed: Decides the order of training.
    """

    def __init__(self, root: str, images: str, batch_size: int = 64, seed: int = 0) -> None:
        super().__init__(root, batch_size=batch_size, num_workers=0, seed=seed)
        self.images = images

    @override
    def samples(self, split: str) -> Iterable[tuple[Tensor, int]] | None:
        return decoded_samples(Path(self.images, split)) if split in SPLITS else None

    @override
    def on_after_batch_transfer(self, batch: tuple[Tensor, Tensor], dataloader_idx: int) -> tuple[Tensor, Tensor]:
        images, labels = batch
        return to_network_input(images), labels


def pack(data: DigitsDataModule, *, advance: Callable[[], None] | None = None) -> float:
    """Writes the stores, calls ``advance`` after each image, and returns how many seconds that took.

    The first ``fit`` would do the same, in ``prepare_data``; here it is timed.
    """

    def told(samples: Iterable[tuple[Tensor, int]]) -> Iterator[tuple[Tensor, int]]:
        for sample in samples:
            yield sample
            if advance is not None:
                advance()

    start = time.perf_counter()
    data.root.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        write_lmdb(told(decoded_samples(Path(data.images, split))), data.path(split))
    return time.perf_counter() - start


def bundle_for(hardware: Hardware) -> str:
    """The preset bundle for this machine.

    Several GPUs count as one: 1,197 images are too few to share out among processes.
    """
    return "single-gpu" if hardware.accelerator in ("cuda", "mps") else "cpu"


def new_model(seed: int) -> DigitNet:
    """A model with the first weights of this seed; the global random state stays as it is."""
    with isolate_rng():
        torch.manual_seed(seed)
        return DigitNet()


def train_from_files(
    model: DigitNet,
    images: str,
    settings: TrainingSettings,
    *,
    num_workers: int = 0,
    tick: Callable[[], None] | None = None,
) -> TrainingResult:
    """The usual way: a torch ``DataLoader`` that opens and decodes one file per sample, and a plain ``Trainer``.

    Workers persist between epochs, the best that this loader can do with them.
    """
    workers = f"{num_workers} persistent workers" if num_workers else "no workers"
    return _train(
        f"files, {num_workers} workers" if num_workers else "files",
        f"image files opened and decoded by Pillow, torch DataLoader with {workers}; plain Trainer",
        model,
        _file_loaders(images, settings, num_workers),
        settings,
        presets=(),
        callbacks=[] if tick is None else [_Tick(tick)],
    )


def train_from_store(
    model: DigitNet,
    data: DigitsDataModule,
    settings: TrainingSettings,
    *,
    presets: Sequence[str] = (),
    callbacks: Sequence[Callback] = (),
    tick: Callable[[], None] | None = None,
) -> TrainingResult:
    """The same training from LMDB stores: with a plain ``Trainer``, or with presets and further callbacks."""
    names = ", ".join(presets)
    return _train(
        f"LMDB, preset {names}" if presets else "LMDB",
        f"decoded images in LMDB, no workers; {f'Trainer with the preset {names}' if presets else 'plain Trainer'}",
        model,
        data,
        settings,
        presets=presets,
        callbacks=[*callbacks, *([] if tick is None else [_Tick(tick)])],
    )


class _Tick(Callback):
    """Tells the progress display that a training step is done."""

    def __init__(self, tick: Callable[[], None]) -> None:
        self._tick = tick

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._tick()


def _file_loaders(images: str, settings: TrainingSettings, num_workers: int) -> dict[str, DataLoader[Any]]:
    return {
        split: DataLoader(
            (data := DigitFiles(Path(images, split))),
            batch_size=settings.batch_size,
            sampler=_same_order(data, settings.seed) if split == "train" else None,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
        )
        for split in SPLITS
    }


def _same_order(data: DigitFiles, seed: int) -> DistributedSampler[tuple[Tensor, int]]:
    """What ``shuffle=True`` does, with the order of :class:`DigitsDataModule`, so that trainings can be compared."""
    return DistributedSampler(data, num_replicas=1, rank=0, shuffle=True, seed=seed)


def _train(
    name: str,
    description: str,
    model: DigitNet,
    data: DigitsDataModule | dict[str, DataLoader[Any]],
    settings: TrainingSettings,
    *,
    presets: Sequence[str],
    callbacks: Sequence[Callback],
) -> TrainingResult:
    recorder = RunRecorder()
    arguments: dict[str, Any] = {
        "max_epochs": settings.epochs,
        "callbacks": [recorder, *callbacks],
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    with isolate_rng(), _interrupt_stays_an_interrupt():
        torch.manual_seed(settings.seed)
        trainer = Trainer(**trainer_kwargs(*presets, **arguments)) if presets else Trainer(devices=1, **arguments)
        if isinstance(data, DigitsDataModule):
            trainer.fit(model, datamodule=data)
            quality = trainer.test(model, datamodule=data, verbose=False)
        else:
            trainer.fit(model, data["train"], data["val"])
            quality = trainer.test(model, data["test"], verbose=False)
    run = recorder.run
    return TrainingResult(
        name=name,
        description=description,
        precision=run.precision,
        timing=run.train,
        seconds_fit=run.seconds_fit,
        test_accuracy=float(quality[0]["test_acc"]),
        weights_digest=_digest(model),
    )


def _digest(model: DigitNet) -> str:
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        digest.update(name.encode())
        digest.update(value.cpu().numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def _interrupt_stays_an_interrupt() -> Iterator[None]:
    """On Ctrl-C Lightning turns the signal off for good and asks Python to exit; here it is a KeyboardInterrupt."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit as stop:
        signal.signal(signal.SIGINT, handler)
        raise KeyboardInterrupt from stop

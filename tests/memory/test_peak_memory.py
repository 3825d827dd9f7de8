"""Peaks of each phase, with an allocator whose numbers are made up here, and on the host with a known allocation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_speedkit.measure.memory_use import DeviceMemory, read_host_bytes
from lightning_speedkit.memory import peak_memory
from lightning_speedkit.memory.peak_memory import PeakMemory
from tests.conformance.models import Classifier, loader, quiet_trainer
from tests.memory.test_leak_monitor import _Recorder

_MIB = 1 << 20


class Allocator:
    """Of a device: what is allocated raises the peak until that is set back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.peak = 10
        monkeypatch.setattr(peak_memory, "read_device_memory", lambda device: self._read())
        monkeypatch.setattr(peak_memory, "reset_device_peak", lambda device: self._reset())

    def needs(self, size: int) -> None:
        self.peak = max(self.peak, self.now + size)

    def _read(self) -> DeviceMemory:
        return DeviceMemory(allocated_bytes=self.now, peak_bytes=self.peak, reserved_bytes=self.peak)

    def _reset(self) -> None:
        self.peak = self.now


class Net(Classifier):
    def __init__(self, allocator: Allocator) -> None:
        super().__init__()
        self.allocator = allocator

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.allocator.needs(100 + batch_idx)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.allocator.needs(7 if self.trainer.sanity_checking else 300)
        super().validation_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.allocator.needs(50)


def test_each_phase_has_its_own_peak_and_training_goes_on_after_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks, logger = PeakMemory(), _Recorder()
    model = Net(Allocator(monkeypatch))
    trainer = quiet_trainer([peaks], max_epochs=2, num_sanity_val_steps=1, logger=logger, val_check_interval=2)
    trainer.fit(model, loader(), loader())
    assert {phase: peak.device_bytes for phase, peak in peaks.peaks.items()} == {
        "sanity": 17,
        "train": 115,  # six batches, 0 to 5
        "validation": 310,
    }
    told = [(name, number) for one in logger.metrics for name, number in one.items() if name.endswith("device_bytes")]
    assert told[:2] == [("peak_memory/sanity_device_bytes", 17.0), ("peak_memory/validation_device_bytes", 310.0)]
    assert told.count(("peak_memory/train_device_bytes", 115.0)) == 2
    trainer.test(model, loader(), verbose=False)
    kept = {phase: peak.device_bytes for phase, peak in peaks.peaks.items()}
    assert kept == {"sanity": 17, "train": 115, "validation": 310, "test": 60}


def test_a_phase_that_runs_again_has_the_peak_of_its_last_run(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(monkeypatch)
    model, peaks = Net(allocator), PeakMemory()
    quiet_trainer([peaks], max_epochs=1).fit(model, loader(), loader())
    allocator.now = 5  # half of what was there before
    trainer = quiet_trainer([peaks], max_epochs=1)
    trainer.validate(model, loader(), verbose=False)
    trainer.test(model, loader(), verbose=False)
    assert {phase: peak.device_bytes for phase, peak in peaks.peaks.items()} == {
        "train": 115,
        "validation": 305,
        "test": 55,
    }
    quiet_trainer([peaks], max_epochs=1, limit_val_batches=0).fit(model, loader())
    assert {phase: peak.device_bytes for phase, peak in peaks.peaks.items()} == {"train": 110, "test": 55}


def test_on_the_host_a_phase_that_needs_more_than_ever_is_exact() -> None:
    if read_host_bytes() is None:
        pytest.skip("this system does not tell")
    before = read_host_bytes() or 0

    class Big(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            np.ones(256 * _MIB, dtype=np.uint8)  # gone before the batch ends

    peaks = PeakMemory()
    quiet_trainer([peaks], max_epochs=1).fit(Big(), loader(), loader())
    train, validation = peaks.peaks["train"], peaks.peaks["validation"]
    assert (train.device_bytes, validation.device_bytes) == (None, None)
    assert validation.host_bytes is not None
    assert train.host_bytes is not None
    # the process may have had more before this test: then only what is left after a batch can be seen
    assert validation.host_bytes > before - 64 * _MIB
    assert train.host_bytes < before + 200 * _MIB


def test_a_logger_that_fails_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(_Recorder):
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            if any(name.startswith("peak_memory") for name in metrics):
                raise OSError("no space")

    with pytest.warns(UserWarning, match="could not log to Fails") as told:
        quiet_trainer([PeakMemory()], max_epochs=2, logger=Fails()).fit(Classifier(), loader(), loader())
    assert sum("PeakMemory" in str(one.message) for one in told) == 1


def test_training_is_the_same_to_the_bit() -> None:
    def losses(*callbacks: Any) -> list[Tensor]:
        torch.manual_seed(1)
        model = Classifier()
        quiet_trainer(list(callbacks), max_epochs=2).fit(model, loader(), loader())
        return model.losses

    torch.testing.assert_close(losses(PeakMemory()), losses(), rtol=0, atol=0)

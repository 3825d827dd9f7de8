"""Leaves every test as it found the process: folder, environment, presets, random state, torch's switches."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import numpy
import pytest
import torch

from lightning_speedkit.presets.catalogue import REGISTRY

hypothesis.settings.register_profile("kit", deadline=None)  # a first import in a test takes seconds on a busy machine
hypothesis.settings.load_profile("kit")


@pytest.fixture(autouse=True)
def _as_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)  # lightning_logs and the like land here
    environment, known = dict(os.environ), dict(REGISTRY._presets)
    torch.backends.cudnn.benchmark = False  # a Trainer with benchmark=True leaves it on
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    yield
    os.environ.clear()
    os.environ.update(environment)
    REGISTRY._presets.clear()  # a page of the docs registers a preset
    REGISTRY._presets.update(known)
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision("highest")
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:  # keywords would also hold the words of an id
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))

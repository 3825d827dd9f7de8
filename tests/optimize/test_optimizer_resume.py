"""A run that is resumed with another optimizer is told so by name, before torch looks at parameter groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback

from lightning_speedkit.optimize import OptimizerChoice, ScheduleChoice
from tests.optimize.line import Line, batches_of, loader, trainer


def _fit(*callbacks: Callback, path: Path | None = None, epochs: int = 1) -> Any:
    run = trainer(*callbacks, max_epochs=epochs)
    run.fit(Line(), loader(batches_of(1, 1)), ckpt_path=path, weights_only=True)
    return run


def _saved(path: Path, *callbacks: Callback) -> Path:
    _fit(*callbacks).save_checkpoint(path / "last.ckpt")
    return path / "last.ckpt"


def test_the_same_choice_goes_on(tmp_path: Path) -> None:
    path = _saved(tmp_path, OptimizerChoice("adam", lr=0.1))
    resumed = _fit(OptimizerChoice("adam", lr=0.1), path=path, epochs=2)
    unbroken = _fit(OptimizerChoice("adam", lr=0.1), epochs=2)
    assert resumed.global_step == 4
    assert torch.equal(resumed.lightning_module.w, unbroken.lightning_module.w)


def test_another_choice_is_named(tmp_path: Path) -> None:
    path = _saved(tmp_path, OptimizerChoice("adam", lr=0.1))
    with pytest.raises(MisconfigurationException, match=r"saved with OptimizerChoice\('adam'\).* has .*'sgd-momentum'"):
        _fit(OptimizerChoice("sgd-momentum"), path=path, epochs=2)
    with pytest.raises(MisconfigurationException, match=r"OptimizerChoice\('adam'\).* has no OptimizerChoice"):
        _fit(ScheduleChoice("constant"), path=path, epochs=2)


def test_without_any_of_the_callbacks_lightning_names_it(tmp_path: Path) -> None:
    path = _saved(tmp_path, OptimizerChoice("adam", lr=0.1))
    # no callback of the kit is there to say more, and torch fails in the first step
    with (
        pytest.warns(UserWarning, match=r"add the following callbacks: \['OptimizerChoice'\]"),
        pytest.raises(KeyError),
    ):
        _fit(path=path, epochs=2)


def test_a_choice_upon_the_modules_own_optimizer_is_told(tmp_path: Path) -> None:
    path = _saved(tmp_path)  # plain SGD, one group of one parameter as here
    with pytest.raises(MisconfigurationException, match=r"another optimizer than OptimizerChoice\('adam'\) makes"):
        _fit(OptimizerChoice("adam", lr=0.1), path=path, epochs=2)

"""A callback works for one running Trainer at a time."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, Timer
from lightning.pytorch.trainer.states import TrainerStatus

from lightning_speedkit.measure.one_run import begin_run, is_in_another_run, refuse_second


def _trainer(*callbacks: Callback, running: bool = False) -> Any:
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=list(callbacks))
    if running:
        trainer.state.status = TrainerStatus.RUNNING
    return trainer


def test_the_object_of_a_run_is_refused_to_another_trainer_until_that_run_is_over() -> None:
    callback, outer, inner = Callback(), _trainer(running=True), _trainer(running=True)
    begin_run(callback, outer)
    begin_run(callback, outer)  # a test inside a fit
    with pytest.raises(MisconfigurationException, match="This Callback is in use by another Trainer"):
        begin_run(callback, inner)
    assert (is_in_another_run(callback, inner), is_in_another_run(callback, outer)) == (True, False)
    outer.state.status = TrainerStatus.INTERRUPTED
    begin_run(callback, inner)
    assert is_in_another_run(callback, outer)


def test_copies_and_objects_of_a_trainer_that_is_gone_are_free() -> None:
    callback, outer, inner = Timer(), _trainer(running=True), _trainer(running=True)
    begin_run(callback, outer)
    for one in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        begin_run(one, inner)
    del outer
    gc.collect()
    begin_run(callback, inner)


def test_a_second_of_its_kind_is_refused() -> None:
    class Special(Timer):
        pass

    refuse_second(_trainer(Timer(), Callback()), Timer, "would both stop the run.")
    with pytest.raises(MisconfigurationException, match=r"^Two Timer callbacks would both stop the run\.$"):
        refuse_second(_trainer(Timer(), Special()), Timer, "would both stop the run.")

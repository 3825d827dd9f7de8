"""A second callback of a kind is refused in the kit's words, and states keep the name of the class."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback

from lightning_speedkit.memory import BatchSizeSearch
from lightning_speedkit.optimize import (
    AutoMicroBatch,
    AverageWeights,
    GradientClipping,
    NonFiniteGuard,
    OptimizerChoice,
    ScheduleChoice,
    SpikeGuard,
)
from tests.optimize.line import Line, batches_of, loader, trainer

KINDS = (
    *(AutoMicroBatch, AverageWeights, BatchSizeSearch, GradientClipping),
    *(NonFiniteGuard, OptimizerChoice, ScheduleChoice, SpikeGuard),
)


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_one_is_refused_in_our_words(kind: type[Callback]) -> None:
    run = trainer(kind(), kind())
    with pytest.raises(MisconfigurationException, match=rf"{kind.__name__}.* (Keep|keep) one") as raised:
        run.fit(Line(), loader(batches_of(1)))
    assert "state_key" not in str(raised.value)


@pytest.mark.parametrize("kind", [AutoMicroBatch, GradientClipping, NonFiniteGuard, SpikeGuard])
def test_states_are_saved_under_the_name_of_the_class(kind: type[Callback], tmp_path: Path) -> None:
    arguments = {"by": "zclip"} if kind is GradientClipping else {}
    run = trainer(kind(**arguments))
    run.fit(Line(), loader(batches_of(1, 1)))
    run.save_checkpoint(tmp_path / "last.ckpt")
    assert list(torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"]) == [kind.__name__]

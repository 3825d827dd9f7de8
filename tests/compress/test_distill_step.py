"""A function in the place of a training step, and the step back where it was."""

from __future__ import annotations

import copy
import inspect
from typing import Any

from lightning.pytorch import LightningModule

from lightning_speedkit.compress.distill_step import wrap_training_step


class _Counts(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int, dataloader_iter: Any = None) -> int:
        self.seen.append((batch, batch_idx))
        return 10 * batch_idx


def _one_more(module: LightningModule, step: Any, args: Any, kwargs: Any) -> Any:
    return step(*args, **kwargs) + 1


def test_it_runs_around_the_step_which_keeps_its_signature() -> None:
    module = _Counts()
    signature = inspect.signature(module.training_step)
    undo = wrap_training_step(module, _one_more)
    assert module.training_step("a", 2) == 21
    assert module.training_step("b", batch_idx=3) == 31
    assert module.seen == [("a", 2), ("b", 3)]
    assert inspect.signature(module.training_step) == signature
    undo()
    assert module.training_step("c", 2) == 20
    assert "training_step" not in vars(module)


def test_a_copy_runs_the_plain_step_on_itself() -> None:
    module = _Counts()
    wrap_training_step(module, _one_more)
    twin = copy.deepcopy(module)
    assert twin.training_step("a", 2) == 20
    assert (len(module.seen), len(twin.seen)) == (0, 1)


def test_a_step_that_the_instance_had_comes_back_and_one_that_came_later_stays() -> None:
    module = _Counts()
    own = vars(module)["training_step"] = lambda batch, batch_idx: -1
    undo = wrap_training_step(module, _one_more)
    assert module.training_step("a", 2) == 0
    undo()
    assert vars(module)["training_step"] is own
    undo = wrap_training_step(module, _one_more)
    later = vars(module)["training_step"] = lambda batch, batch_idx: -2
    undo()
    assert vars(module)["training_step"] is later


def test_two_around_one_step_are_undone_in_either_order() -> None:
    for first in (0, 1):
        module = _Counts()
        undo = [wrap_training_step(module, _one_more), wrap_training_step(module, _one_more)]
        assert module.training_step("a", 2) == 22
        undo[first]()
        assert module.training_step("a", 2) == 21
        undo[1 - first]()
        assert module.training_step("a", 2) == 20
        assert "training_step" not in vars(module)

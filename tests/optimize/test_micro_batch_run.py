"""A step that is run until it fits logs once, and returns what the whole batch would have."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_speedkit.optimize.batch_split import samples_of, split_batch
from lightning_speedkit.optimize.micro_batch_retry import BatchPieces
from lightning_speedkit.optimize.micro_batch_run import StepRuns, replaced, with_loss
from lightning_speedkit.optimize.micro_batch_size import MicroBatchSize


class _Logs(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[str, float]] = []

    def log(self, name: str, value: Any, **options: Any) -> None:  # type: ignore[override]
        self.logged.append((name, float(value)))

    def step(self, batch: Tensor) -> Any:
        self.log("mean", batch.mean())
        if len(batch) > 2:
            raise MemoryError
        return {"mean": batch.mean(), "rows": batch}


def _runs(module: LightningModule, weigh: Any = samples_of) -> StepRuns:
    return StepRuns(module, BatchPieces(samples_of, split_batch, weigh), torch.device("cpu"))


def test_what_failed_logged_nothing_and_pieces_log_once() -> None:
    module, batch, undone = _Logs(), torch.tensor([1.0, 2.0, 6.0]), []
    runs, pieces = _runs(module), BatchPieces(samples_of, split_batch, samples_of)

    def run(at_once: int | None) -> Any:
        if at_once is None:
            with runs.recording() as logs:
                return logs, module.step(batch)
        parts, samples, shares = pieces.cut(batch, 2)
        outputs, recorded = [], []
        for part in parts:
            with runs.recording() as logs:
                outputs.append(module.step(part))
            recorded.append(logs)
        return runs.joined_logs(recorded, samples, shares), runs.joined(outputs, samples, shares)

    output = runs.until_it_fits(run, MicroBatchSize(), batch, lambda: undone.append(1), "A step")
    assert module.logged == [("mean", 3.0)]
    assert (output["mean"].item(), output["rows"].tolist(), undone) == (3.0, [1.0, 2.0, 6.0], [1])


def test_outputs_that_have_no_whole_are_told_once() -> None:
    runs = _runs(_Logs())
    with pytest.warns(UserWarning, match="for the last piece of a batch stands for all of it") as told:
        assert [runs.joined(["a", "b"], [1, 1], [0.5, 0.5]) for _ in range(2)] == ["b", "b"]
    assert len(told) == 1


def test_a_batch_is_looked_at_once_and_before_memory_runs_out() -> None:
    runs = _runs(_Logs())
    with pytest.warns(UserWarning, match="cannot compute this batch in pieces"):
        runs.look_at((torch.zeros(2), torch.zeros(3)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runs.look_at("text")

    def nothing(piece: Any) -> int:
        raise ValueError("nothing to count")

    with pytest.raises(ValueError, match="nothing to count"):
        _runs(_Logs(), nothing).look_at(torch.zeros(2))


def test_a_method_is_put_back_also_after_an_error() -> None:
    box = torch.nn.Identity()
    with replaced(box, "forward", lambda x: 2 * x), pytest.raises(ZeroDivisionError), replaced(box, "forward", abs):  # noqa: PT012
        assert box(-1) == 1
        raise ZeroDivisionError
    assert (box(3), "forward" in vars(box)) == (3, False)


def test_a_loss_is_exchanged_and_the_rest_has_no_graph() -> None:
    weight = torch.ones(2, requires_grad=True)
    given = {"loss": weight.sum(), "rows": [2 * weight], "name": "a"}
    found = with_loss(given, torch.tensor(5.0))
    assert (found["loss"].item(), found["rows"][0].requires_grad, found["name"]) == (5.0, False, "a")
    assert given["rows"][0].requires_grad  # type: ignore[union-attr]

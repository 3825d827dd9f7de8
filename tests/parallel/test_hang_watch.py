"""A rank that stays away is named, with the place where it is, and so is the collective in which the other waits."""

from __future__ import annotations

import pickle
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_speedkit.parallel.hang_watch import HangWatch, hang_report, where_it_is
from tests.two_ranks import on_ranks, on_two_ranks


def stays_away(seconds: float) -> None:
    time.sleep(seconds)


class Late(LightningModule):
    """One rank is late in its third batch."""

    def __init__(self, seconds: float, rank: int = 1) -> None:
        super().__init__()
        self.net, self.seconds, self.rank = nn.Linear(2, 1), seconds, rank

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 2 and self.global_rank == self.rank:
            stays_away(self.seconds)
        return self.net(batch).mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(watch: HangWatch, module: LightningModule, devices: int = 2, **options: Any) -> None:
    Trainer(
        accelerator="cpu",
        devices=devices,
        max_epochs=1,
        callbacks=watch,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **options,
    ).fit(module, DataLoader(torch.ones(8, 2)))


def _late(folder: str) -> str | None:
    watch = HangWatch(seconds=1.0, folder=folder)
    _fit(watch, Late(5.0), strategy="speedkit_ddp")
    return watch.report


def test_the_late_rank_is_named(tmp_path: Path) -> None:
    report, other = on_two_ranks(_late, str(tmp_path), timeout=60)
    assert other is None
    lines = report.splitlines()
    assert lines[:2] == ["No rank has come further for 1 s.", "The others wait for rank 1, which is in no collective."]
    first, second = report[report.index("\nRank 0 ") :].split("\nRank 1 ")
    assert "Rank 0 waits in the backward, in which DDP averages the gradients. Last: a backward began." in first
    assert second.startswith("is in no collective. Last: training batch 2 of epoch 0 began.")
    assert "in stays_away" in second
    assert "in stays_away" not in first
    assert (tmp_path / "hang.txt").read_text() == f"{report}\n"


def _ends(folder: str) -> None:
    _fit(HangWatch(seconds=1.0, folder=folder, end=True), Late(50.0), strategy="speedkit_ddp")


def test_all_ranks_can_be_ended(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as raised:
        on_ranks(2, _ends, str(tmp_path), timeout=60)
    told = str(raised.value)
    assert "rank 0 ended with exit code 1" in told
    assert "rank 1 ended with exit code 1" in told
    assert "The others wait for rank 1, which is in no collective." in (tmp_path / "hang.txt").read_text()


def test_one_process_that_stands_still() -> None:
    watch = HangWatch(seconds=0.5)
    _fit(watch, Late(2.0, rank=0), devices=1)
    assert watch.report is not None
    assert watch.report.count("Rank 0 is in no collective") == 1
    assert "in stays_away" in watch.report
    assert not [thread for thread in threading.enumerate() if thread.name == "hang watch"]


def test_a_run_that_goes_on_is_left_alone() -> None:
    watch = HangWatch(seconds=30)
    _fit(watch, Late(0.0), devices=1)
    assert watch.report is None
    assert pickle.loads(pickle.dumps(watch)).seconds == 30


def test_different_collectives_are_told() -> None:
    ranks = {rank: {"last": "x", "collective": name, "stack": ""} for rank, name in enumerate(("barrier", "broadcast"))}
    assert "The ranks wait in different collectives" in hang_report(5, ranks, 2)


@pytest.mark.parametrize(
    ("file", "name", "told"),
    [
        ("/x/torch/distributed/distributed_c10d.py", "all_gather", "all_gather"),
        ("/x/torch/distributed/distributed_c10d.py", "_private", ""),
        ("/x/torch/nn/parallel/distributed.py", "_pre_forward", "the start of the forward of DDP"),
        ("/x/mine.py", "all_reduce", ""),
    ],
)
def test_the_collective_of_a_stack(file: str, name: str, told: str) -> None:
    frames = [traceback.FrameSummary("a.py", 1, "fit"), traceback.FrameSummary(file, 2, name)]
    assert where_it_is(traceback.StackSummary.from_list(frames)) == told


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"seconds": 0}, ValueError),
        ({"seconds": float("nan")}, ValueError),
        ({"seconds": "5"}, TypeError),
        ({"folder": 3}, TypeError),
        ({"end": "no"}, TypeError),
    ],
)
def test_arguments_that_make_no_sense(arguments: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind, match=next(iter(arguments))):
        HangWatch(**arguments)

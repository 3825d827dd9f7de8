"""The two-process runner itself: it must join real ranks, report a failure, and end what hangs."""

from __future__ import annotations

import os
import time

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from tests.two_ranks import on_two_ranks


def _fit() -> tuple[int, int, torch.Tensor]:
    torch.manual_seed(0)
    model = BoringModel()
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model)
    return trainer.global_rank, trainer.world_size, model.layer.weight.detach()


def _fail() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("the words of the failure")
    time.sleep(60)


def test_two_real_ranks_train_together() -> None:
    first, second = on_two_ranks(_fit)
    assert (first[0], second[0]) == (0, 1)
    assert first[1] == second[1] == 2
    torch.testing.assert_close(first[2], second[2], rtol=0, atol=0)


def test_a_failing_rank_is_reported_and_the_other_is_ended() -> None:
    start = time.monotonic()
    with pytest.raises(AssertionError, match="the words of the failure"):
        on_two_ranks(_fail)
    assert time.monotonic() - start < 50

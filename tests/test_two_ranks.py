"""The two-process runner itself: it joins real ranks, and what hangs, fails or ends is told by its name."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from tests.preloaded import run_forked
from tests.two_ranks import on_two_ranks


def _fit() -> tuple[int, int, torch.Tensor, float]:
    first = torch.rand(1).item()
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
    return trainer.global_rank, trainer.world_size, model.layer.weight.detach(), first


def _hang(rank: str) -> None:
    print("the words before")
    if os.environ["RANK"] == rank:
        time.sleep(600)


def _fail() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("the words of the failure")
    time.sleep(600)


def _end() -> None:
    if os.environ["RANK"] == "0":
        os._exit(7)


def test_two_real_ranks_train_together() -> None:
    first, second = on_two_ranks(_fit)
    assert (first[0], second[0]) == (0, 1)
    assert first[1] == second[1] == 2
    torch.testing.assert_close(first[2], second[2], rtol=0, atol=0)
    assert on_two_ranks(_fit)[0][3] == first[3]  # nothing of a run is left for the next one


def test_a_case_that_hangs_is_named_with_the_place() -> None:
    with pytest.raises(AssertionError) as error:
        on_two_ranks(_hang, "1", timeout=3.0)
    text = str(error.value)
    assert text.startswith("_hang('1') on 2 ranks")
    assert "rank 0 ended with exit code 0\nthe words before" in text
    assert "rank 1 hangs" in text
    assert "in _hang" in text  # the line that faulthandler printed


@pytest.mark.parametrize(
    ("function", "words"), [(_fail, "ValueError: the words of the failure"), (_end, "exit code 7")]
)
def test_a_case_that_fails_or_ends_is_told_and_the_other_rank_is_ended(function: object, words: str) -> None:
    start = time.monotonic()
    with pytest.raises(AssertionError, match=words):
        on_two_ranks(function)  # type: ignore[arg-type]
    assert time.monotonic() - start < 50


def test_processes_are_fresh_and_what_they_print_comes_back(tmp_path: Path) -> None:
    os.environ["SAID"] = "by the test"
    ended = run_forked(_say)
    assert ended.returncode == 3
    assert ended.stdout.split("|") == [f"{tmp_path}", "by the test", "True\n"]
    assert ended.stderr == "on the other stream\n"


def _say() -> None:
    print(Path.cwd(), os.environ["SAID"], os.getsid(0) == os.getpid(), sep="|")
    print("on the other stream", file=sys.stderr)
    sys.exit(3)

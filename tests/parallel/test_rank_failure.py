"""A rank that fails ends the other one with its message; nobody waits for a timeout of half an hour."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_speedkit.parallel import SpeedkitDDPStrategy
from lightning_speedkit.parallel.rank_failure import FailureRelay, failure_text
from tests.two_ranks import on_ranks, on_two_ranks


class Fails(LightningModule):
    """Raises in its third batch on one rank, or on all."""

    def __init__(self, rank: int | None) -> None:
        super().__init__()
        self.net, self.rank = nn.Linear(2, 1), rank

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 2 and self.rank in (None, self.global_rank):
            raise ArithmeticError("the third batch is bad")
        return self.net(batch).mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _trainer(devices: int = 2) -> Trainer:
    return Trainer(
        strategy="speedkit_ddp",
        accelerator="cpu",
        devices=devices,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )


def _fit(rank: int | None, folder: str, devices: int) -> None:
    """Writes the error of this rank to a file, and lets the process end with it."""
    run = _trainer(devices)
    try:
        run.fit(Fails(rank), DataLoader(torch.ones(8 * devices, 2)))
    except BaseException as error:
        Path(folder, str(run.global_rank)).write_text(f"{type(error).__name__}: {error}")
        raise


def _ends(world: int, *arguments: Any) -> str:
    with pytest.raises(AssertionError) as raised:
        on_ranks(world, *arguments, timeout=60)
    assert "hangs" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(("world", "rank"), [(2, 0), (2, 1), (3, 1)])
def test_the_others_end_with_its_message(tmp_path: Path, world: int, rank: int) -> None:
    _ends(world, _fit, rank, str(tmp_path), world)
    for other in range(world):
        error = (tmp_path / str(other)).read_text()
        if other == rank:
            assert error == "ArithmeticError: the third batch is bad"
        else:
            assert f"Rank {rank} failed: ArithmeticError: the third batch is bad (" in error
            assert f"Rank {other} ended for it, with:" in error


def _all_fail_and_go_on() -> list[str]:
    found, run = [], _trainer()
    for rank in (None, 5):
        try:
            run.fit(Fails(rank), DataLoader(torch.ones(16, 2)))
            found.append("none")
        except ArithmeticError as error:
            found.append(str(error))
    return found


def test_all_may_fail_and_fit_again() -> None:
    assert on_two_ranks(_all_fail_and_go_on, timeout=60) == [["the third batch is bad", "none"]] * 2


def _lives_on() -> None:
    """Rank 1 catches its failure and lives on; rank 0 is blocked in a collective that it will not join."""
    torch.distributed.init_process_group("gloo")
    relay = FailureRelay("127.0.0.1", patience=0.5)
    if torch.distributed.get_rank() == 1:
        assert relay.tell(KeyError("lost")) is None
        time.sleep(4)
    else:
        torch.distributed.all_reduce(torch.ones(1))


def test_a_blocked_rank_ends_although_the_other_lives_on() -> None:
    told = _ends(2, _lives_on)
    assert "Rank 1 failed: KeyError: 'lost'\nRank 0 waited for it and ends." in told
    assert "rank 0 ended with exit code 1" in told


def _busy() -> Any:
    """Rank 0 is not blocked: it works on, and is left alone until it is done."""
    torch.distributed.init_process_group("gloo")
    relay = FailureRelay("127.0.0.1", patience=1.0)
    if torch.distributed.get_rank() == 1:
        relay.tell(KeyError("lost"))
        time.sleep(4)
        return None
    end, count = time.monotonic() + 4, 0
    while time.monotonic() < end:
        count += 1
    told = relay.tell(RuntimeError("mine"))
    relay.close()
    return told


def test_a_rank_that_works_is_left_alone() -> None:
    assert on_two_ranks(_busy, timeout=60) == ["Rank 1 failed: KeyError: 'lost'", None]


def test_the_place_is_told() -> None:
    try:
        raise ValueError("no data")
    except ValueError as error:
        text = failure_text(3, error)
    assert text.startswith("Rank 3 failed: ValueError: no data (")
    assert text.endswith("in test_the_place_is_told)")


def _port_in_use(port: int) -> str:
    os.environ["MASTER_PORT"] = str(port)
    if os.environ["RANK"] == "1":
        return ""
    try:
        _trainer().fit(Fails(None), DataLoader(torch.ones(2, 2)))
    except MisconfigurationException as error:
        return str(error)
    return "none"


def test_a_port_in_use_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        told = on_two_ranks(_port_in_use, port, timeout=60)
    assert told[0].startswith(f"Port {port}, on which the ranks meet, is in use")


def test_half_of_the_rank_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "0")
    run = Trainer(strategy=SpeedkitDDPStrategy(), accelerator="cpu", devices=2, logger=False)
    with pytest.raises(MisconfigurationException, match="LOCAL_RANK=0 is set, but MASTER_PORT is not"):
        run.fit(Fails(None), DataLoader(torch.ones(2, 2)))

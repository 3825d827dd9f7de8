"""Interrupted and started again, a run ends with the weights of one that was not, bit for bit."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_speedkit.data import RingLoader
from lightning_speedkit.measure.own_random_numbers import own_random_numbers
from lightning_speedkit.parallel.spot_interruption import SpotInterruption
from tests.parallel.launched_training import train
from tests.two_ranks import on_ranks, on_two_ranks

BATCHES, LAST = 12, 11  # of an epoch, on two ranks
LIMIT = 50.0


def start(folder: str, send: list[Any] | None, options: dict[str, Any]) -> Any:
    """What the run says of itself, or the code that it ended with; runs in each of several processes."""
    try:
        return train(folder, send, options)
    except SystemExit as end:
        return end.code


def start_on(folder: Path, send: list[Any] | None = None, **options: Any) -> list[Any]:
    return on_two_ranks(start, str(folder), send, options, timeout=LIMIT)


def weights(folder: Path) -> dict[str, Tensor]:
    return torch.load(folder / "weights.pt", weights_only=True)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The final weights for a number of accumulated batches."""
    found: dict[int, dict[str, Tensor]] = {}

    def of(accumulate: int) -> dict[str, Tensor]:
        if accumulate not in found:
            folder = tmp_path_factory.mktemp("whole")
            start_on(folder, accumulate=accumulate)
            found[accumulate] = weights(folder)
        return found[accumulate]

    return of


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("accumulate", "rank", "epoch", "batch", "step"),
    [
        (1, 1, 1, 4, 12 + 5),
        (1, 0, 0, LAST, 12 + 1),  # with the first step of the next epoch
        (3, 1, 1, 3, 4 + 2),  # at the end of the window
        (3, 0, 2, LAST, 12),  # at the end of the run
    ],
)
def test_a_signal_to_one_rank_ends_all_at_one_step(
    uninterrupted: Any, tmp_path: Path, accumulate: int, rank: int, epoch: int, batch: int, step: int
) -> None:
    ended = start_on(tmp_path, ["SIGTERM", str(rank), epoch, batch], accumulate=accumulate)
    assert ended == [0, 0]
    saved = torch.load(tmp_path / "interrupted.ckpt", weights_only=True)
    assert saved["global_step"] == step
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert not (tmp_path / "weights.pt").exists()

    again = start_on(tmp_path, accumulate=accumulate)
    assert [one["rank"] for one in again] == [0, 1]
    for name, whole in uninterrupted(accumulate).items():
        assert torch.equal(weights(tmp_path)[name], whole), name


@pytest.mark.timeout(60)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_ends_the_other_with_a_message(uninterrupted: Any, tmp_path: Path, rank: int) -> None:
    with pytest.raises(AssertionError) as failure:
        start_on(tmp_path, ["SIGKILL", str(rank), 1, 4])
    told = str(failure.value)
    assert f"rank {rank} ended with exit code -9" in told
    assert f"rank {1 - rank} ended with exit code 1" in told
    assert f"says why. Rank {1 - rank} cannot go on without it and ends. Start all of them again" in told

    start_on(tmp_path)  # from the checkpoint of every second step
    for name, whole in uninterrupted(3).items():
        assert torch.equal(weights(tmp_path)[name], whole), name


@pytest.mark.timeout(60)
def test_the_exit_code_and_two_interruptions(uninterrupted: Any, tmp_path: Path) -> None:
    assert start_on(tmp_path, ["SIGTERM", "0", 0, 4], exit_code=75) == [75, 75]
    for path in tmp_path.glob("sent*"):
        path.unlink()
    assert start_on(tmp_path, ["SIGTERM", "1", 2, 1], exit_code=75) == [75, 75]
    start_on(tmp_path)
    for name, whole in uninterrupted(3).items():
        assert torch.equal(weights(tmp_path)[name], whole), name


def _from_unlike_checkpoints(folder: str) -> str:
    where = Path(folder, os.environ["RANK"])
    where.mkdir()
    if os.environ["RANK"] == "1":
        Path(folder, "interrupted.ckpt").rename(where / "interrupted.ckpt")
    try:
        train(str(where), None, {})
    except MisconfigurationException as error:
        return str(error)
    return ""


@pytest.mark.timeout(60)
def test_ranks_that_go_on_from_unlike_checkpoints_are_refused(tmp_path: Path) -> None:
    start_on(tmp_path, ["SIGTERM", "1", 1, 4])
    told = on_two_ranks(_from_unlike_checkpoints, str(tmp_path), timeout=LIMIT)
    assert "Rank 0 goes on at step 0, and others between steps 0 and 6" in told[0]
    assert "Rank 1 goes on at step 6" in told[1]


@pytest.mark.timeout(60)
def test_it_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    start_on(tmp_path, ["SIGTERM", "1", 1, 5])
    (alone,) = on_ranks(1, start, str(tmp_path), None, {"devices": 1}, timeout=LIMIT)
    assert alone["world"] == 1
    assert (tmp_path / "weights.pt").exists()


class Plain(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Raises(Callback):
    """Raises a signal in this process at a batch, or in a hook that is named."""

    def __init__(self, number: signal.Signals, at: int | str) -> None:
        self.number, self.at = number, at

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.at:
            signal.raise_signal(self.number)

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        if self.at == "sanity" and trainer.sanity_checking:
            signal.raise_signal(self.number)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        if self.at == "end":
            signal.raise_signal(self.number)

    def on_fit_end(self, trainer: Trainer, pl_module: Any) -> None:
        if self.at == "done":
            signal.raise_signal(self.number)


class Counts(Callback):
    """Has a state that changes after each batch."""

    seen, ended = 0, False

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.seen += 1

    def on_train_end(self, *arguments: Any) -> None:
        self.ended = True

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}


def loader() -> RingLoader:
    return RingLoader(torch.ones(6, 2), batch_size=1, num_workers=0)


def trainer_with(*callbacks: Callback, **arguments: Any) -> Trainer:
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 1}
    quiet["enable_checkpointing"] = saves
    return Trainer(accelerator="cpu", devices=1, callbacks=list(callbacks), **(quiet | arguments))


def test_other_signals_and_the_handlers_from_before(tmp_path: Path) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    spot = SpotInterruption(tmp_path, "stop", signals=["SIGUSR1"], exit_code=3)
    trainer = trainer_with(spot, Raises(signal.SIGUSR1, 2))
    with pytest.raises(SystemExit) as end:
        trainer.fit(Plain(), loader())
    assert end.value.code == 3
    assert torch.load(spot.ckpt_path, weights_only=True)["global_step"] == 3
    assert {number: signal.getsignal(number) for number in before} == before

    trainer_with(SpotInterruption(tmp_path)).fit(Plain(), loader())
    assert {number: signal.getsignal(number) for number in before} == before
    assert not (tmp_path / "interrupted.ckpt").exists()


def test_a_signal_in_the_sanity_check_waits_for_the_first_step(tmp_path: Path) -> None:
    spot = SpotInterruption(tmp_path)
    with pytest.raises(SystemExit):
        trainer_with(spot, Raises(signal.SIGTERM, "sanity")).fit(Plain(), loader(), loader())
    assert torch.load(spot.ckpt_path, weights_only=True)["global_step"] == 1


def test_a_signal_after_the_last_step_waits_for_the_end_of_training(tmp_path: Path) -> None:
    spot, counts = SpotInterruption(tmp_path), Counts()
    trainer = trainer_with(spot, counts, Raises(signal.SIGTERM, "end"))
    with pytest.raises(SystemExit):
        trainer.fit(Plain(), loader())
    assert counts.ended
    assert torch.load(spot.ckpt_path, weights_only=True)["global_step"] == 6


class Stops(Callback):
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = batch_idx == 3


@pytest.mark.parametrize("by", ["max_steps", "should_stop"])
def test_a_run_that_is_over_within_an_epoch_comes_to_its_end(tmp_path: Path, by: str) -> None:
    counts, raises = Counts(), Raises(signal.SIGTERM, 3)
    others, steps = ([Stops()], -1) if by == "should_stop" else ([], 4)
    trainer = trainer_with(SpotInterruption(tmp_path), counts, raises, *others, max_epochs=3, max_steps=steps)
    with pytest.raises(SystemExit):
        trainer.fit(Plain(), loader())
    assert counts.ended
    assert trainer.global_step == 4


def test_a_stop_that_comes_too_early_is_no_end(tmp_path: Path) -> None:
    counts, raises = Counts(), Raises(signal.SIGTERM, 3)
    trainer = trainer_with(SpotInterruption(tmp_path), counts, raises, Stops(), max_epochs=3, min_epochs=2)
    with pytest.raises(SystemExit):
        trainer.fit(Plain(), loader())
    assert not counts.ended
    assert trainer.global_step == 4


def test_a_signal_when_all_is_done_is_for_the_script(tmp_path: Path) -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        trainer_with(SpotInterruption(tmp_path), Raises(signal.SIGTERM, "done")).fit(Plain(), loader())
    finally:
        signal.signal(signal.SIGTERM, before)
    assert came == [signal.SIGTERM]
    assert list(tmp_path.iterdir()) == []


def test_the_second_fit_of_the_same_objects_forgets_the_signal(tmp_path: Path) -> None:
    spot, raises = SpotInterruption(tmp_path), Raises(signal.SIGTERM, 0)
    trainer = trainer_with(spot, raises, max_epochs=2)
    with pytest.raises(SystemExit):
        trainer.fit(Plain(), loader())
    raises.at = "never"
    trainer.fit(Plain(), loader(), ckpt_path=spot.ckpt_path)
    assert trainer.global_step == 12


def test_it_asks_only_every_so_many_steps(tmp_path: Path) -> None:
    spot = SpotInterruption(tmp_path, every_n_steps=4)
    with pytest.raises(SystemExit):
        trainer_with(spot, Raises(signal.SIGTERM, 1)).fit(Plain(), loader())
    assert torch.load(spot.ckpt_path, weights_only=True)["global_step"] == 4


def test_it_saves_after_the_other_callbacks_are_done(tmp_path: Path) -> None:
    spot, keeps = SpotInterruption(tmp_path), ModelCheckpoint(tmp_path, "kept")
    trainer = trainer_with(spot, Counts(), keeps, Raises(signal.SIGTERM, 2))
    with pytest.raises(SystemExit):
        trainer.fit(Plain(), loader())
    assert torch.load(spot.ckpt_path, weights_only=True)["callbacks"]["Counts"] == {"seen": 3}
    assert trainer.checkpoint_callback is keeps


@pytest.mark.parametrize("setting", ["fast_dev_run", "barebones"])
def test_fast_dev_run_and_barebones_are_left_alone(tmp_path: Path, setting: str) -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []

    class Looks(Callback):
        def on_train_batch_end(self, *arguments: Any) -> None:
            seen.append(getattr(signal.getsignal(signal.SIGTERM), "__self__", None))

    spot = SpotInterruption(tmp_path)
    Trainer(accelerator="cpu", devices=1, max_steps=1, callbacks=[spot, Looks()], **{setting: True}).fit(
        Plain(), loader(), loader()
    )
    assert seen == [None]
    assert signal.getsignal(signal.SIGTERM) == before
    assert not list(tmp_path.glob("*.ckpt"))


class Dropped(Plain):
    """The random numbers of dropout and of a shuffled loader; ``losses`` tells them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(float(loss))
        return loss


def test_a_shuffled_loader_without_a_position_goes_on_at_the_next_epoch(tmp_path: Path) -> None:
    samples = torch.randn(6, 2, generator=torch.Generator().manual_seed(1))

    def fit(epochs: int, path: Path | None = None) -> list[float]:
        saves = ModelCheckpoint(tmp_path, "epoch{epoch}", save_top_k=-1)
        model = Dropped()
        torch.manual_seed(3)
        trainer = trainer_with(SpotInterruption(tmp_path), saves, max_epochs=epochs)
        trainer.fit(model, DataLoader(samples, shuffle=True), ckpt_path=path)
        return model.losses

    with own_random_numbers():
        whole = fit(3)
        assert fit(3, tmp_path / "epochepoch=1.ckpt") == whole[12:]


def test_a_loader_without_a_position_is_warned_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="training loader has no state_dict"):
        trainer_with(SpotInterruption(tmp_path)).fit(Plain(), DataLoader(torch.ones(4, 2)))


def test_a_fit_in_a_thread_is_warned_of(tmp_path: Path) -> None:
    trainer = trainer_with(SpotInterruption(tmp_path))
    thread = threading.Thread(target=trainer.fit, args=(Plain(), loader()))

    def run() -> None:
        thread.start()
        thread.join()

    with pytest.warns(UserWarning, match="hears no signal"):
        run()
    assert trainer.global_step == 6


def test_two_of_them_are_refused(tmp_path: Path) -> None:
    class Other(SpotInterruption):
        pass

    with pytest.raises(MisconfigurationException, match="two SpotInterruption"):
        trainer_with(SpotInterruption(tmp_path), Other(tmp_path, "b")).fit(Plain(), loader())


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        ({"filename": ""}, ValueError, "plain name"),
        ({"filename": "a/b"}, ValueError, "plain name"),
        ({"filename": ".hidden"}, ValueError, "plain name"),
        ({"dirpath": "s3://bucket/runs"}, ValueError, "must be a folder"),
        ({"signals": []}, ValueError, "SIGTERM, SIGUSR1"),
        ({"signals": "SIGTERM"}, ValueError, "list of names"),
        ({"signals": ["SIGKILL"]}, ValueError, "SIGKILL"),
        ({"every_n_steps": 0}, ValueError, "from 1 to"),
        ({"every_n_steps": 1.0}, TypeError, "whole number"),
        ({"exit_code": 256}, ValueError, "from 0 to 255"),
        ({"exit_code": True}, TypeError, "whole number"),
    ],
)
def test_a_wrong_argument_is_refused(arguments: dict[str, Any], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        SpotInterruption(**{"dirpath": "checkpoints", **arguments})

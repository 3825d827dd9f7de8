"""RunRecorder in real Trainers: counts by hand on a fake clock, the split by loaders that are slow on purpose."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.profilers import SimpleProfiler
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_speedkit.facts import read_run
from lightning_speedkit.measure import RunRecorder, run_recorder
from lightning_speedkit.measure.profiler_tap import ProfilerTap
from tests.two_ranks import on_two_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
    pytest.mark.filterwarnings("ignore:.*dataloader_iter"),
]


class FakeTime:
    """A host clock that stands still unless a loader, a step or a callback moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        return self.now

    def passed(self, mark: float) -> bool:
        return True

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def release(self, mark: float) -> None:
        pass

    def wait(self) -> None:
        pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr(run_recorder, "clock_for", lambda device: fake)
    monkeypatch.setattr(run_recorder, "HostClock", lambda: fake)
    return fake


class Batches(Dataset[torch.Tensor]):
    def __init__(self, count: int, spend: Any) -> None:
        self.count, self.spend = count, spend

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        self.spend()
        return torch.full((2,), float(index))


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, count: int, spend: Any) -> None:
        self.count, self.spend = count, spend

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(self.count):
            self.spend()
            yield torch.full((2,), float(index))


class Model(LightningModule):
    def __init__(self, spend: Any = lambda: None, validate: Any = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.spend, self.validate = spend, validate

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.spend()
        return self.layer(batch).square().mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.validate()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def idle() -> None:
    """Can be sent to another process, as no lambda can."""


class IdleModel(Model):
    def __init__(self) -> None:
        super().__init__(idle)


class IdleBatches(Batches):
    def __init__(self, count: int) -> None:
        super().__init__(count, idle)


class IteratorModel(Model):
    def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return super().training_step(batch, 0)


def trainer(tmp_path: Path, *callbacks: Callback, **arguments: Any) -> Trainer:
    settings: dict[str, Any] = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": tmp_path,
        "callbacks": list(callbacks),
    }
    return Trainer(**{**settings, **arguments})


def spending(clock: FakeTime, seconds: float) -> Any:
    def spend() -> None:
        clock.now += seconds

    return spend


class Spender(Callback):
    """Another callback that is slow in every hook around the batch."""

    def __init__(self, clock: FakeTime) -> None:
        self.clock = clock

    def on_train_batch_start(self, *arguments: Any) -> None:
        self.clock.now += 16

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.clock.now += 32


@pytest.mark.parametrize("first", [True, False])
def test_exact_split_with_another_callback_on_either_side(tmp_path: Path, clock: FakeTime, first: bool) -> None:
    recorder, spender = RunRecorder(warmup_steps=1), Spender(clock)
    callbacks = [recorder, spender] if first else [spender, recorder]
    loader = DataLoader(Batches(12, spending(clock, 1)), batch_size=2)  # a batch of two costs 2
    trainer(tmp_path, *callbacks, max_epochs=2).fit(Model(spending(clock, 4)), loader)
    run = recorder.run
    assert (run.train.steps, run.train.samples, run.epochs, run.optimizer_steps) == (10, 20, 2, 12)
    assert run.train.seconds_data == 10 * 2
    assert run.train.seconds_compute == 10 * 4
    # the last step of an epoch ends with its compute, before on_train_batch_end of any callback
    assert run.train.seconds_wall == 10 * (2 + 16 + 4) + 8 * 32
    assert run.seconds_warmup == 2 * (2 + 16 + 4 + 32)
    assert run.seconds_fit == 12 * (2 + 16 + 4 + 32)
    assert run.train.median_seconds_per_step == 54.0
    assert run.outcome == "completed"


def test_sanity_check_and_validation_are_in_no_step(tmp_path: Path, clock: FakeTime) -> None:
    recorder = RunRecorder(warmup_steps=0)
    training = DataLoader(Batches(8, spending(clock, 1)))
    validation = DataLoader(Batches(3, spending(clock, 500)))
    model = Model(spending(clock, 4), spending(clock, 100))
    trainer(tmp_path, recorder, val_check_interval=2, num_sanity_val_steps=2).fit(model, training, validation)
    run = recorder.run
    assert (run.train.steps, run.train.seconds_wall) == (8, 8 * (1 + 4))
    assert run.seconds_validation == 4 * 3 * (500 + 100)  # four validations; the sanity check is before training
    assert run.seconds_fit == run.train.seconds_wall + run.seconds_validation


def test_saving_a_checkpoint_is_in_no_step(tmp_path: Path, clock: FakeTime) -> None:
    class SlowState(Callback):
        def on_save_checkpoint(self, *arguments: Any) -> None:
            clock.now += 1000

    recorder = RunRecorder(warmup_steps=0)
    checkpoint = ModelCheckpoint(dirpath=tmp_path / "saved", every_n_train_steps=2, save_top_k=-1)
    loader = DataLoader(Batches(6, spending(clock, 1)))
    trainer(tmp_path, recorder, SlowState(), checkpoint).fit(Model(spending(clock, 4)), loader)
    run = recorder.run
    assert (run.train.steps, run.train.seconds_wall) == (6, 6 * (1 + 4))
    assert run.train.seconds_data == 6.0
    assert run.seconds_checkpoint == 3 * 1000


def test_saving_inside_a_step_is_in_no_step(tmp_path: Path, clock: FakeTime) -> None:
    class SlowState(Callback):
        def on_save_checkpoint(self, *arguments: Any) -> None:
            clock.now += 1000

    class Saving(Model):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            self.trainer.save_checkpoint(tmp_path / "inside.ckpt")
            return super().training_step(batch, batch_idx)

    recorder = RunRecorder(warmup_steps=0)
    loader = DataLoader(Batches(3, spending(clock, 1)))
    trainer(tmp_path, recorder, SlowState()).fit(Saving(spending(clock, 4)), loader)
    assert recorder.run.train.seconds_compute == 3 * 4
    assert recorder.run.train.seconds_wall == 3 * 5


def test_a_loader_without_length_loses_no_step(tmp_path: Path, clock: FakeTime) -> None:
    recorder = RunRecorder(warmup_steps=0)
    loader = DataLoader(Stream(5, spending(clock, 1)))
    trainer(tmp_path, recorder, max_epochs=2).fit(Model(spending(clock, 4)), loader)
    run = recorder.run
    assert (run.train.steps, run.train.samples, run.train.seconds_compute) == (10, 10, 40.0)
    # five fetches per epoch; Lightning makes the very first one before training begins
    assert run.train.seconds_data == 9.0


def test_a_step_that_fetches_by_itself(tmp_path: Path, clock: FakeTime) -> None:
    recorder = RunRecorder(warmup_steps=0)
    loader = DataLoader(Batches(4, spending(clock, 1)))
    trainer(tmp_path, recorder).fit(IteratorModel(spending(clock, 4)), loader)
    timing = recorder.run.train
    assert (timing.steps, timing.samples) == (4, 4)
    assert (timing.seconds_data, timing.seconds_compute, timing.seconds_wall) == (4.0, 16.0, 20.0)


def test_accumulation_counts_batches_as_steps(tmp_path: Path, clock: FakeTime) -> None:
    recorder = RunRecorder(warmup_steps=0)
    loader = DataLoader(Batches(6, spending(clock, 1)))
    trainer(tmp_path, recorder, accumulate_grad_batches=4).fit(Model(spending(clock, 4)), loader)
    run = recorder.run
    assert (run.train.steps, run.optimizer_steps, run.accumulate_grad_batches) == (6, 2, 4)


class SetsFactor(Callback):
    """Sets the factor during a fit and puts it back when training ends, however it ends."""

    def setup(self, trainer: Trainer, *arguments: Any, stage: str) -> None:
        trainer.accumulate_grad_batches = 4

    def on_train_end(self, trainer: Trainer, *arguments: Any) -> None:
        trainer.accumulate_grad_batches = 1

    def on_exception(self, trainer: Trainer, *arguments: Any) -> None:
        trainer.accumulate_grad_batches = 1


@pytest.mark.parametrize("fails_at", [None, 1, 6], ids=str)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    "made", [SetsFactor, lambda: GradientAccumulationScheduler({0: 4})], ids=["own", "lightning's"]
)
def test_the_factor_is_that_of_training_whoever_comes_first(
    tmp_path: Path, made: Any, first: bool, fails_at: int | None
) -> None:
    calls = iter(range(1, 100))

    def spend() -> None:
        if next(calls) == fails_at:
            raise ValueError("broken")

    recorder, other = RunRecorder(warmup_steps=0), made()
    fitting = trainer(tmp_path, *([recorder, other] if first else [other, recorder]))
    with nullcontext() if fails_at is None else pytest.raises(ValueError, match="broken"):
        fitting.fit(Model(spend), DataLoader(Batches(8, lambda: None)))
    steps = {None: 2, 1: 0, 6: 1}[fails_at]
    assert (recorder.run.accumulate_grad_batches, recorder.run.optimizer_steps) == (4, steps)


@pytest.mark.parametrize("first", [True, False])
def test_the_epoch_that_averaging_adds_has_no_step_and_no_factor(tmp_path: Path, first: bool) -> None:
    class Norm(Model):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.BatchNorm1d(1))  # type: ignore[assignment]
            self.taken = 0

        def optimizer_step(self, *arguments: Any, **options: Any) -> None:
            self.taken += not self.trainer.fit_loop._skip_backward
            super().optimizer_step(*arguments, **options)

    recorder, averaging, model = RunRecorder(warmup_steps=0), StochasticWeightAveraging(0.1, swa_epoch_start=1), Norm()
    callbacks = [recorder, averaging] if first else [averaging, recorder]
    fitting = trainer(tmp_path, *callbacks, max_epochs=3, accumulate_grad_batches=2)
    fitting.fit(model, DataLoader(Batches(12, lambda: None), batch_size=2))
    run = recorder.run
    assert (run.accumulate_grad_batches, run.epochs, run.train.steps) == (2, 4, 24)
    assert run.optimizer_steps == model.taken == 9  # 3 epochs of 6 batches


@pytest.mark.parametrize(("loading", "computing"), [(0.02, 0.002), (0.002, 0.02)])
def test_the_slower_side_is_named_on_the_real_clock(tmp_path: Path, loading: float, computing: float) -> None:
    recorder = RunRecorder(warmup_steps=2)
    loader = DataLoader(Batches(12, lambda: time.sleep(loading)))
    trainer(tmp_path, recorder).fit(Model(lambda: time.sleep(computing)), loader)
    timing = recorder.run.train
    assert timing.seconds_data >= 10 * loading  # a sleep is never shorter than asked for
    assert timing.seconds_compute >= 10 * computing
    assert (timing.seconds_data > timing.seconds_compute) == (loading > computing)
    assert timing.seconds_data + timing.seconds_compute <= timing.seconds_wall


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()])
def test_an_exception_leaves_the_facts_so_far_and_the_file(
    tmp_path: Path, clock: FakeTime, error: BaseException
) -> None:
    calls = 0

    def spend() -> None:
        nonlocal calls
        calls += 1
        clock.now += 4
        if calls == 4:
            raise error

    recorder = RunRecorder(warmup_steps=1, path=str(tmp_path / "run.json"))
    fitting = trainer(tmp_path, recorder)
    profiler = fitting.profiler
    with pytest.raises((ValueError, SystemExit)):
        fitting.fit(Model(spend), DataLoader(Batches(8, spending(clock, 1))))
    assert recorder.run.outcome == type(error).__name__
    assert (recorder.run.train.steps, recorder.run.train.seconds_compute) == (2, 8.0)
    assert read_run(tmp_path / "run.json") == recorder.run
    assert fitting.profiler is profiler


def test_an_exception_in_the_loader(tmp_path: Path, clock: FakeTime) -> None:
    def broken() -> None:
        clock.now += 1
        if clock.now > 10:  # 1 + 4, 1 + 4, and the third fetch
            raise OSError("disk")

    recorder = RunRecorder(warmup_steps=0)
    with pytest.raises(OSError, match="disk"):
        trainer(tmp_path, recorder).fit(Model(spending(clock, 4)), DataLoader(Batches(8, broken)))
    assert (recorder.run.outcome, recorder.run.train.steps) == ("OSError", 2)


def test_a_failure_after_training_keeps_the_facts(tmp_path: Path) -> None:
    class Broken(Callback):
        def on_fit_end(self, *arguments: Any) -> None:
            raise ValueError("after training")

    path = tmp_path / "run.json"
    recorder = RunRecorder(warmup_steps=0, path=str(path))
    fitting = trainer(tmp_path, Broken(), recorder)
    loader = DataLoader(Batches(3, lambda: None))
    with pytest.raises(ValueError, match="after training"):
        fitting.fit(Model(), loader)
    assert read_run(path) == recorder.run
    assert (recorder.run.outcome, recorder.run.train.steps) == ("completed", 3)
    path.unlink()
    with pytest.raises(TypeError, match="invalid dataloader"):
        fitting.fit(Model(), [object()])  # fails before training: nothing new to write, and the old is not repeated
    assert not path.exists()


def test_a_second_fit_starts_afresh_and_the_live_facts_grow(tmp_path: Path, clock: FakeTime) -> None:
    seen: list[tuple[str, int]] = []

    class Watch(Callback):
        def on_train_batch_end(self, *arguments: Any) -> None:
            seen.append((recorder.run.outcome, recorder.run.train.steps))

    recorder = RunRecorder(warmup_steps=0)
    loader = DataLoader(Batches(3, spending(clock, 1)))
    fitting = trainer(tmp_path, recorder, Watch())
    model = Model(spending(clock, 4))
    fitting.fit(model, loader)
    first = recorder.run
    fitting.fit_loop.max_epochs = 2
    fitting.fit(model, loader)
    assert first.train.steps == 3
    assert recorder.run.train.steps == 3
    assert seen == [("running", 0), ("running", 1), ("running", 2)] * 2


def test_the_file_and_its_manners(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run.json"
    recorder = RunRecorder(warmup_steps=0, path=str(path))
    trainer(tmp_path, recorder).fit(Model(), DataLoader(Batches(3, lambda: None)))
    assert read_run(path) == recorder.run
    assert [entry.name for entry in path.parent.iterdir()] == ["run.json"]
    quick = RunRecorder(warmup_steps=0, path=str(tmp_path / "quick.json"))
    trainer(tmp_path, quick, fast_dev_run=True).fit(Model(), DataLoader(Batches(3, lambda: None)))
    assert not (tmp_path / "quick.json").exists()
    with pytest.raises(IsADirectoryError, match="name a file"):
        trainer(tmp_path, RunRecorder(path=str(tmp_path))).fit(Model(), DataLoader(Batches(3, lambda: None)))


def test_a_file_that_cannot_be_written_warns_and_loses_nothing(tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the folder should be")
    recorder = RunRecorder(warmup_steps=0, path=str(blocked / "run.json"))
    with pytest.warns(UserWarning, match="could not write"):
        trainer(tmp_path, recorder).fit(Model(), DataLoader(Batches(3, lambda: None)))
    assert recorder.run.train.steps == 3


def test_too_few_steps_warn_once(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(tmp_path, RunRecorder(warmup_steps=3), max_epochs=3).fit(Model(), DataLoader(Batches(3, lambda: None)))
    assert sum("RunRecorder counted no step" in str(warning.message) for warning in caught) == 1


def test_training_is_bit_identical_and_the_users_profiler_still_works(tmp_path: Path) -> None:
    def weights(*callbacks: Callback, profiler: Any = None) -> torch.Tensor:
        torch.manual_seed(1)
        model = Model()
        loader = DataLoader(Batches(6, lambda: None), shuffle=True)
        trainer(tmp_path, *callbacks, profiler=profiler, max_epochs=2).fit(model, loader)
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    profiler, alone = SimpleProfiler(), SimpleProfiler()
    plain = weights(profiler=alone)
    recorded = weights(RunRecorder(), profiler=profiler)
    assert torch.equal(plain, recorded)
    heard = {name: len(seconds) for name, seconds in profiler.recorded_durations.items() if "RunRecorder" not in name}
    assert heard == {name: len(seconds) for name, seconds in alone.recorded_durations.items()}


def test_the_profiler_is_handed_back(tmp_path: Path) -> None:
    during: list[bool] = []

    class Watch(Callback):
        def on_train_batch_start(self, trainer: Trainer, *arguments: Any) -> None:
            during.append(isinstance(trainer.profiler, ProfilerTap))

    first, second = RunRecorder(warmup_steps=0), RunRecorder(warmup_steps=1)
    fitting = trainer(tmp_path, first, second, Watch())
    profiler = fitting.profiler
    fitting.fit(Model(), DataLoader(Batches(3, lambda: None)))
    assert during == [True] * 3
    assert fitting.profiler is profiler
    assert (first.run.train.steps, second.run.train.steps) == (3, 2)


@pytest.mark.parametrize("value", [-1, 1.5, True, "3"])
def test_a_wrong_warmup_is_told(value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="warmup_steps"):
        RunRecorder(warmup_steps=value)


def test_before_any_fit_there_is_nothing() -> None:
    with pytest.raises(RuntimeError, match=r"nothing yet.*'spawn' or 'fork'.*give RunRecorder a path.*read_run"):
        _ = RunRecorder().run


def test_a_fit_in_spawned_processes_leaves_the_file_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    recorder = RunRecorder(warmup_steps=0, path=str(path))
    trainer(tmp_path, recorder, strategy="ddp_spawn").fit(IdleModel(), DataLoader(IdleBatches(3)))
    assert read_run(path).train.steps == 3
    with pytest.raises(RuntimeError, match=re.escape(f"they are in {str(path)!r}, and read them with")):
        _ = recorder.run


@pytest.mark.gpu
def test_cuda_waits_that_hide_behind_queued_work_do_not_count(tmp_path: Path) -> None:
    class Heavy(Model):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            matrix = torch.ones(4096, 4096, device=self.device)
            for _ in range(40):
                matrix = matrix @ matrix * 1e-4
            return super().training_step(batch, batch_idx) + 0 * matrix.sum()

    recorder = RunRecorder(warmup_steps=4)
    loader = DataLoader(Batches(30, lambda: time.sleep(0.002)))
    trainer(tmp_path, recorder, accelerator="gpu").fit(Heavy(), loader)
    timing = recorder.run.train
    assert timing.steps == 26
    assert timing.seconds_data < 26 * 0.002  # the host slept longer than that; the device did not wait for it
    assert timing.seconds_data + timing.seconds_compute <= timing.seconds_wall * 1.001


def _recorded_on_a_rank(folder: str) -> tuple[int, int, int, str]:
    recorder = RunRecorder(warmup_steps=0, path=f"{folder}/rank.json")
    loader = DataLoader(Batches(6, lambda: None))
    fitting = trainer(Path(folder), recorder, devices=2, strategy="ddp")
    fitting.fit(Model(), loader)
    return recorder.run.world_size, recorder.run.train.steps, recorder.run.train.samples, recorder.run.strategy


def test_on_two_ranks_each_measures_itself_and_one_writes(tmp_path: Path) -> None:
    assert on_two_ranks(_recorded_on_a_rank, str(tmp_path)) == [(2, 3, 3, "DDPStrategy")] * 2
    assert read_run(tmp_path / "rank.json").world_size == 2
    assert [path.name for path in tmp_path.glob("*rank.json*")] == ["rank.json"]

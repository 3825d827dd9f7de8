"""A run that is resumed inside a window takes the steps that it would have taken without a break."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_speedkit.optimize import AccumulationScheduler, AccumulationWindow
from lightning_speedkit.optimize.accumulation_checkpoint import restore_window, window_state
from lightning_speedkit.optimize.accumulation_ranks import DataRanks
from tests.optimize.line import Line, Stream, batches_of, loader, steps, trainer

ONE_TO_SIX = batches_of(1, 1, 1, 1, 1, 1)

pytestmark = pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint")


class SaveAt(Callback):
    """Saves in a hook of one batch of one epoch."""

    def __init__(self, path: Path, epoch: int, batch: int, hook: str = "on_train_batch_end") -> None:
        self.path, self.at = path, (epoch, batch)

        def save(trainer: Trainer, *rest: Any, **options: Any) -> None:
            if (trainer.current_epoch, trainer.fit_loop.batch_idx) == self.at and not trainer.sanity_checking:
                trainer.save_checkpoint(path)

        setattr(self, hook, save)


def _rest(batches: list[Tensor], done: int) -> DataLoader[Any]:
    """What a stateful loader gives after ``done`` batches."""
    return DataLoader(Stream(batches[done:]), batch_size=None)


@pytest.mark.parametrize(
    ("saved_after", "arguments", "expected"),
    [
        (3, {"schedule": {0: 1, 1: 4}}, [5.5]),  # between windows
        (4, {"schedule": {0: 1, 1: 4}}, [5.5]),  # 5, then 6
        (0, {"schedule": {0: 1, 1: 4}}, [2.5, 5.5]),
        (3, {"schedule": {0: 4, 2: 1, 3: 5}, "unit": "step"}, [4]),  # 1 | 2 3 4 and, resumed, 5 6
        (2, {"target_batch": 5}, [3, 6]),  # 1 2 3 and, resumed, 4 5 | 6
    ],
)
def test_the_gradients_of_a_window_are_resumed(
    tmp_path: Path,
    recwarn: pytest.WarningsRecorder,
    saved_after: int,
    arguments: dict[str, Any],
    expected: list[float],
) -> None:
    path = tmp_path / "c.ckpt"
    whole = steps(ONE_TO_SIX, AccumulationScheduler(**arguments), SaveAt(path, 1, saved_after), max_epochs=2)
    model = Line()
    run = trainer(AccumulationScheduler(**arguments), max_epochs=2)
    run.fit(model, _rest(ONE_TO_SIX, saved_after + 1), ckpt_path=path, weights_only=True)
    assert model.optimizer.seen == whole[-len(model.optimizer.seen) :]
    assert model.optimizer.seen == expected
    assert not [w for w in recwarn if "accumulation window" in str(w.message)]


class _Net(Line):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype=dtype)
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).to(dtype)
        self.unused = nn.Linear(2, 2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean() * self.w

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.net(batch).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


@pytest.mark.parametrize("precision", ["double", "16-mixed"])
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_end"])
def test_the_weights_are_those_of_a_run_without_a_break_to_the_bit(tmp_path: Path, hook: str, precision: str) -> None:
    path, dtype = tmp_path / "c.ckpt", torch.float64 if precision == "double" else torch.float32
    sizes = [1, 3, 2, 4, 1, 2, 5, 2]
    data = list(torch.randn(sum(sizes), 3, generator=torch.Generator().manual_seed(4), dtype=dtype).split(sizes))

    validation = torch.zeros(1, 3, dtype=dtype)

    def run_over(batches: list[Tensor], *callbacks: Callback, ckpt_path: Path | None = None) -> _Net:
        options: dict[str, Any] = {"max_epochs": 1, "val_check_interval": 1, "num_sanity_val_steps": 0}
        if precision == "16-mixed":
            scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
            options["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler)]
        model = _Net(dtype)
        run = trainer(AccumulationScheduler({0: 1, 2: 3}, unit="step"), *callbacks, **options)
        stream = DataLoader(Stream(batches), batch_size=None)
        run.fit(model, stream, loader([validation]), ckpt_path=ckpt_path, weights_only=True)
        return model

    # 1 | 3 | 2 4 1 | 2 5 2: saved after the fourth micro-batch
    whole = run_over(data, SaveAt(path, 0, 3, hook))
    resumed = run_over(data[4:], ckpt_path=path)
    for ours, expected in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, expected)


def test_a_checkpoint_between_windows_holds_no_gradients(tmp_path: Path) -> None:
    saved = {}
    for batch in range(6):
        path = tmp_path / f"{batch}.ckpt"
        steps(ONE_TO_SIX, AccumulationScheduler(4), SaveAt(path, 0, batch))
        saved[batch] = torch.load(path, weights_only=True)["AccumulationScheduler"]
    assert [saved[batch]["position"] for batch in range(6)] == [1, 2, 3, 0, 1, 0]
    assert [saved[batch]["window"] is None for batch in range(6)] == [False, False, False, True, False, True]
    assert saved[2]["window"]["gradients"]["w"].item() == 6 / 4  # the sum of 1, 2, 3 over the factor


def test_gradients_that_a_checkpoint_does_not_hold_are_told(tmp_path: Path) -> None:
    # saved by Lightning's own accumulation: 5 is lost, and the step is that of 6
    path, model = tmp_path / "c.ckpt", Line()
    steps(ONE_TO_SIX, SaveAt(path, 0, 4), accumulate_grad_batches=4)
    with pytest.warns(UserWarning, match="resumes inside an accumulation window") as told:
        trainer(AccumulationScheduler(4)).fit(model, _rest(ONE_TO_SIX, 5), ckpt_path=path, weights_only=True)
    assert model.optimizer.seen == [6.0]
    assert sum("resumes inside" in str(w.message) for w in told) == 1


@pytest.mark.parametrize("saved_at", [2, 4, 5])
@pytest.mark.parametrize("first", [True, False])
def test_a_checkpoint_that_is_saved_as_a_batch_starts_holds_the_window(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, first: bool, saved_at: int
) -> None:
    path, own = tmp_path / "c.ckpt", AccumulationScheduler(4)
    save = SaveAt(path, 0, saved_at, "on_train_batch_start")
    callbacks = (save, own) if first else (own, save)  # before and after the window is told of the batch
    whole = steps(ONE_TO_SIX, *callbacks)
    model = Line()
    trainer(AccumulationScheduler(4)).fit(model, _rest(ONE_TO_SIX, saved_at), ckpt_path=path, weights_only=True)
    assert whole == [2.5, 5.5]
    assert model.optimizer.seen == (whole if saved_at < 4 else whole[1:])
    assert not [w for w in recwarn if "accumulation window" in str(w.message)]


def test_gradients_of_half_a_micro_batch_are_not_kept(tmp_path: Path) -> None:
    # saved after the backward of 2, which is run again: 1 is lost, and told
    path, model = tmp_path / "c.ckpt", Line()
    steps(ONE_TO_SIX, AccumulationScheduler(3), SaveAt(path, 0, 1, "on_after_backward"))
    with pytest.warns(UserWarning, match="resumes inside an accumulation window"):
        trainer(AccumulationScheduler(3)).fit(model, _rest(ONE_TO_SIX, 1), ckpt_path=path, weights_only=True)
    assert model.optimizer.seen == [2.5, 5.0]


def test_a_checkpoint_of_other_parameters_is_refused(tmp_path: Path) -> None:
    class Other(Line):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            window = checkpoint["AccumulationScheduler"]["window"]
            window["gradients"] = {"v": window["gradients"]["w"]}

    path = tmp_path / "c.ckpt"
    steps(ONE_TO_SIX, AccumulationScheduler(3), SaveAt(path, 0, 0))
    with pytest.raises(MisconfigurationException, match="has gradients of v, which this module does not have"):
        trainer(AccumulationScheduler(3)).fit(Other(), _rest(ONE_TO_SIX, 1), ckpt_path=path, weights_only=True)


def test_a_mean_loss_is_resumed(tmp_path: Path) -> None:
    path, run = tmp_path / "c.ckpt", trainer(AccumulationScheduler(6, log_loss="window"))
    steps(ONE_TO_SIX, AccumulationScheduler(6, log_loss="window"), SaveAt(path, 0, 3))
    run.fit(Line(), _rest(ONE_TO_SIX, 4), ckpt_path=path, weights_only=True)
    assert run.callback_metrics["window"].item() == 3.5


def _gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_a_window_goes_on_where_it_was_put_aside() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    window = AccumulationWindow(divided_by=3)
    model[0].bias.requires_grad_(False)
    (model(torch.ones(4, 2).double()).mean() * window.add(4)).backward()
    window.add(2)
    state = window_state(model.named_parameters(), window, DataRanks())
    kept = copy.deepcopy(state)
    gradient = _gradient(model)
    assert sorted(state["gradients"]) == ["0.weight", "2.bias", "2.weight"]
    model.zero_grad()
    again = restore_window(model.named_parameters(), state, DataRanks())
    assert torch.equal(_gradient(model), gradient)
    assert (again.samples, again.batches, again.reference, again.divided_by) == (6, 2, 4, 3)
    (model(torch.ones(4, 2).double()).mean()).backward()
    assert all(torch.equal(state["gradients"][name], kept["gradients"][name]) for name in kept["gradients"])
    model.zero_grad()
    restore_window(model.named_parameters(), state, DataRanks(), loss_scale_ratio=0.5)
    assert torch.equal(_gradient(model), gradient / 2)


@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"schedule": 4}, [2.5, 5.5]),  # 1 2 3 4 | 5 6
        ({"schedule": {0: 1, 8: 4}, "unit": "step"}, [1, 2, 4.5]),  # the eighth step is that of 2
        ({"target_batch": 4}, [2.5, 5.5]),
    ],
)
def test_a_checkpoint_of_the_last_batch_of_an_epoch_goes_on_with_a_new_window(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, arguments: dict[str, Any], expected: list[float], sized: bool
) -> None:
    path, model = tmp_path / "c.ckpt", Line()
    data = loader(ONE_TO_SIX) if sized else DataLoader(Stream(ONE_TO_SIX), batch_size=None)
    steps(data, AccumulationScheduler(**arguments), SaveAt(path, 0, 5))
    trainer(AccumulationScheduler(**arguments), max_epochs=2).fit(model, data, ckpt_path=path, weights_only=True)
    assert model.optimizer.seen == expected
    assert not [w for w in recwarn if "accumulation window" in str(w.message)]


def test_the_last_batch_of_an_epoch_of_lightnings_own_accumulation_is_between_windows(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    path, model = tmp_path / "c.ckpt", Line()
    steps(ONE_TO_SIX, SaveAt(path, 0, 5), accumulate_grad_batches=4)
    trainer(AccumulationScheduler(4), max_epochs=2).fit(model, loader(ONE_TO_SIX), ckpt_path=path, weights_only=True)
    assert model.optimizer.seen == [2.5, 5.5]
    assert not [w for w in recwarn if "accumulation window" in str(w.message)]


def test_a_micro_batch_in_progress_counts_once_towards_a_target(tmp_path: Path) -> None:
    # saved while 2 is being computed: it is computed again, and a window is still one of three
    path, model = tmp_path / "c.ckpt", Line()
    whole = steps(ONE_TO_SIX, AccumulationScheduler(target_batch=3), SaveAt(path, 0, 1, "on_train_batch_start"))
    run = trainer(AccumulationScheduler(target_batch=3))
    run.fit(model, _rest(ONE_TO_SIX, 1), ckpt_path=path, weights_only=True)
    assert model.optimizer.seen == whole == [2, 5]

"""As on CUDA: nothing is read before the step, and the host makes up for a skip one step later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn

from lightning_speedkit.optimize import non_finite_guard_run
from lightning_speedkit.optimize.non_finite_gradients import has_non_finite_gradient
from lightning_speedkit.optimize.non_finite_guard import NonFiniteGuard
from lightning_speedkit.optimize.non_finite_guard_late import let_kernel_skip, settle_before_saves
from lightning_speedkit.optimize.weight_averaging import AverageWeights
from tests.optimize.line import loader, trainer
from tests.optimize.test_non_finite_guard import Net, assert_equal, batches, fit, with_bad

NAN, INF = float("nan"), float("inf")


def test_a_fused_step_is_skipped_by_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: nothing is read before the step, and the schedule and the counter wait one step later."""
    monkeypatch.setattr(non_finite_guard_run, "is_read_freely", lambda flag: False)
    guard, bad = NonFiniteGuard(explain=False), {0: NAN, 3: INF, 7: NAN}
    found = fit(with_bad(batches(), bad), guard, model=Net("fused", decay=1.0))
    plain = fit([b for place, b in enumerate(batches()) if place not in bad], model=Net("fused", decay=1.0))
    torch.testing.assert_close(dict(found.named_parameters()), dict(plain.named_parameters()), rtol=0, atol=0)
    assert all(buffer.isfinite().all() for buffer in found.buffers())
    assert guard.skipped_steps == 3
    assert found.counted == [1, 1, 2, 3, 3, 4, 5, 6]
    assert found.trainer.global_step == 5
    rates = fit(with_bad(batches(), bad), NonFiniteGuard(explain=False), model=Net("fused")).rates
    assert rates == pytest.approx([0.1 * 0.5**steps for steps in [1, 1, 2, 3, 3, 4, 5, 6]])
    assert not hasattr(found.trainer.optimizers[0], "found_inf")


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA."""
    monkeypatch.setattr(non_finite_guard_run, "is_read_freely", lambda flag: False)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("optimizer", ["fused", "fused-sgd"])
def test_two_in_a_row_and_the_first_one(optimizer: str) -> None:
    guard, bad = NonFiniteGuard(explain=False), {0: NAN, 3: INF, 4: NAN}
    found = fit(with_bad(batches(), bad), guard, model=Net(optimizer, decay=1.0))
    plain = fit([b for place, b in enumerate(batches()) if place not in bad], model=Net(optimizer, decay=1.0))
    torch.testing.assert_close(dict(found.named_parameters()), dict(plain.named_parameters()), rtol=0, atol=0)
    assert all(buffer.isfinite().all() for buffer in found.buffers())
    assert found.trainer.global_step == 5


@pytest.mark.usefixtures("late")
def test_a_checkpoint_holds_no_trace_of_a_skip_that_was_not_read(tmp_path: Path) -> None:
    class Saves(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                trainer.save_checkpoint(tmp_path / "a.ckpt")

    data = with_bad(batches(), {3: NAN})
    whole = fit(data, Saves(), NonFiniteGuard(explain=False), model=Net("fused"))
    assert "save_checkpoint" not in vars(whole.trainer)
    saved = torch.load(tmp_path / "a.ckpt", weights_only=False)
    assert all(value.isfinite().all() for value in saved["state_dict"].values())
    assert saved["global_step"] == 3

    resumed = Net("fused")
    run = trainer(NonFiniteGuard(explain=False))
    run.fit(resumed, loader(data[4:] * 2), ckpt_path=tmp_path / "a.ckpt")  # it goes on with the fifth of these
    assert_equal(resumed, whole)
    assert run.global_step == whole.trainer.global_step == 7
    assert resumed.rates == whole.rates[4:]
    assert whole.rates[-1] == pytest.approx(0.1 * 0.5**7)  # the debt was saved


@pytest.mark.usefixtures("late")
def test_after_an_exception_a_skip_that_was_not_read_is_undone() -> None:
    class Fails(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if batch_idx == 4:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    model, guard = Fails("fused"), NonFiniteGuard(explain=False)
    run = trainer(guard)
    with pytest.raises(ZeroDivisionError):
        run.fit(model, loader(with_bad(batches(), {3: NAN})))
    assert_equal(model, fit(batches()[:3], model=Net("fused")))
    assert run.global_step == 3
    assert guard.state_dict() == {"skipped_steps": 1, "in_a_row": 1, "owed": 1}


@pytest.mark.usefixtures("late")
def test_a_late_skip_of_the_last_step_is_made_up_for() -> None:
    found = fit(with_bad(batches(), {2: NAN}), NonFiniteGuard(explain=False), model=Net("fused"), max_steps=3)
    assert found.counted == [1, 2, 2, 3]


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("unit", ["step", "epoch"])
@pytest.mark.parametrize("bad", [{}, {3: NAN}, {0: INF, 3: NAN, 4: NAN, 7: NAN}])
def test_an_average_of_the_weights_waits_until_the_step_is_known(unit: str, bad: dict[int, float]) -> None:
    def averaged(data: list[Tensor]) -> tuple[Net, AverageWeights]:
        average = AverageWeights(decay=0.5, unit=unit)
        return fit(data, average, NonFiniteGuard(explain=False), model=Net("fused", decay=1.0), max_epochs=2), average

    found, average = averaged(with_bad(batches(), bad))
    plain, other = averaged([batch for place, batch in enumerate(batches()) if place not in bad])
    torch.testing.assert_close(dict(found.named_parameters()), dict(plain.named_parameters()), rtol=0, atol=0)
    assert all(buffer.isfinite().all() for buffer in found.buffers())
    assert average.updates == other.updates == (2 if unit == "epoch" else 2 * (8 - len(bad)))
    if not bad:  # else running statistics leave out the step after the skipped one too
        assert_equal(
            found, fit(batches(), AverageWeights(decay=0.5, unit=unit), model=Net("fused", decay=1.0), max_epochs=2)
        )


def test_a_flag_is_for_one_step() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5, fused=True)
    for value, expected in ((NAN, 1.0), (1.0, 0.5)):
        weight.grad = torch.full((2,), value)
        let_kernel_skip(optimizer, has_non_finite_gradient(optimizer))
        optimizer.step()
        assert not hasattr(optimizer, "found_inf")
        assert weight.tolist() == [expected] * 2
    optimizer.step()
    assert weight.tolist() == [0.0] * 2


def test_saves_that_another_has_wrapped_are_left_to_it() -> None:
    run, told = trainer(), []
    first = settle_before_saves(run, lambda: told.append(1))
    second = settle_before_saves(run, lambda: told.append(2))
    first()  # not its turn: the other one's is on top
    assert "save_checkpoint" in vars(run)
    second()
    assert vars(run).get("save_checkpoint") is not None  # the first one's, which was there before
    first()
    assert run.save_checkpoint.__func__ is Trainer.save_checkpoint  # type: ignore[attr-defined]
    assert told == []

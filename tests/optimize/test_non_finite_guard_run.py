"""Under a gradient scaler, and what is left behind when a run fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from lightning_speedkit.errors import DivergenceError
from lightning_speedkit.optimize import non_finite_guard_run
from lightning_speedkit.optimize.non_finite_guard import NonFiniteGuard
from lightning_speedkit.precision import SpeedkitMixedPrecision
from tests.optimize.line import Line, loader, trainer
from tests.optimize.test_non_finite_guard import Net, batches, fit, with_bad

NAN, INF = float("nan"), float("inf")


def test_under_a_scaler_a_window_without_a_last_loss_is_no_skip() -> None:
    class Last(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return None if batch_idx == 3 else super().training_step(batch, batch_idx)

    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
    guard = NonFiniteGuard()
    found = fit(batches(6), guard, model=Last(), plugins=[plugin], accumulate_grad_batches=2)
    assert guard.skipped_steps == 0
    assert found.counted == [0, 1, 1, 1, 1, 2]  # Lightning takes no step there


class _Half(Line):
    """T-P1: the loss of some batches is infinite."""

    def __init__(self, fused: bool) -> None:
        super().__init__(dtype=torch.float32)
        self.fused = fused
        self.seen: list[tuple[float, float, int]] = []

    def on_train_batch_end(self, *_: Any) -> None:
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.seen.append((self.w.item(), rate, self.trainer.global_step))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5, fused=self.fused)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("is_late", [False, True])
def test_the_skips_of_a_scaler_are_no_steps(
    ours: bool, fused: bool, is_late: bool, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    if is_late:
        monkeypatch.setattr(non_finite_guard_run, "is_read_freely", lambda flag: False)
    plugin = (
        SpeedkitMixedPrecision("16-mixed", initial_scale=1024.0)
        if ours
        else MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
    )
    guard, model = NonFiniteGuard(), _Half(fused)
    data = [torch.tensor([x]) for x in (INF, INF, 1.0, 1.0)]
    trainer(guard, plugins=[plugin]).fit(model, loader(data))
    expected = [(1.0, 0.5, 0), (1.0, 0.5, 0), (0.5, 0.25, 1), (0.25, 0.125, 2)]
    if is_late and fused and not ours:  # the host learns of a skip one step later, and pays for it then
        expected = [(1.0, 0.25, 1), (1.0, 0.25, 1), (0.75, 0.25, 1), (0.5, 0.125, 2)]
    assert model.seen == expected
    assert guard.skipped_steps == 2
    assert model.trainer.lr_scheduler_configs[0].interval == "step"
    assert not [w for w in recwarn if "not finite" in str(w.message)]  # it is part of the scaler's work


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_first_step_that_a_scaler_skips_leaves_no_momenta(
    ours: bool, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fused SGD with momentum would take memory that nothing was written to for them."""
    if is_late:
        monkeypatch.setattr(non_finite_guard_run, "is_read_freely", lambda flag: False)

    def run(data: list[Tensor], scale: float) -> tuple[Net, NonFiniteGuard]:
        plugin = (
            SpeedkitMixedPrecision("16-mixed", initial_scale=scale)
            if ours
            else MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale))
        )
        guard = NonFiniteGuard()
        return fit(data, guard, model=Net("fused-sgd"), plugins=[plugin]), guard

    data = batches(4)
    spoilt = [torch.full_like(data[0], INF), torch.full_like(data[0], NAN), *data]
    (found, guard), (plain, _) = run(spoilt, 1024.0), run(data, 256.0)
    torch.testing.assert_close(found.state_dict(), plain.state_dict(), rtol=0, atol=0)
    assert (guard.skipped_steps, found.trainer.global_step, found.rates[-4:]) == (2, 4, plain.rates)


def test_a_scaler_is_given_time_to_find_its_scale() -> None:
    def plugin() -> MixedPrecision:
        return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))

    data = [torch.tensor([INF])] * 18
    trainer(NonFiniteGuard(2), plugins=[plugin()]).fit(_Half(False), loader(data))
    with pytest.raises(DivergenceError, match=r"19 of them in a row; allowed are max_in_a_row=18"):
        trainer(NonFiniteGuard(2), plugins=[plugin()]).fit(_Half(False), loader([*data, data[0]]))


def test_after_an_exception_schedules_are_released() -> None:
    class Fails(Net):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            raise ZeroDivisionError

    run = trainer(NonFiniteGuard())
    with pytest.raises(ZeroDivisionError):
        run.fit(Fails(), loader(with_bad(batches(), {0: NAN})))
    assert run.lr_scheduler_configs[0].interval == "step"

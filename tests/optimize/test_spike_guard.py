"""A run with spikes equals the run without those batches, or the run from the snapshot on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_speedkit.errors import DivergenceError
from lightning_speedkit.optimize import non_finite_guard_run
from lightning_speedkit.optimize.non_finite_guard import NonFiniteGuard
from lightning_speedkit.optimize.spike_guard import SpikeGuard
from tests.optimize.line import Line, Stream, loader, trainer

NAN = float("nan")


class _Net(Line):
    """The loss is multiplied by what the first number of the batch says; so is the gradient."""

    def __init__(self, decay: float = 1.0) -> None:
        super().__init__(dtype=torch.float32)
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.w.requires_grad_(False)  # DDP wants to have every weight used
        self.decay = decay
        self.counted: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.net(batch[:, 1:]).square().mean() * 0.1 + 1.0) * batch[0, 0]

    def on_train_batch_end(self, *_: Any) -> None:
        self.counted.append(self.trainer.global_step)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, self.decay)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def batches(count: int = 24, spikes: dict[int, float] | None = None) -> list[Tensor]:
    data = torch.randn(count, 5, 4, generator=torch.Generator().manual_seed(4))
    data[:, 0, 0] = 1.0
    for place, factor in (spikes or {}).items():
        data[place, 0, 0] = factor
    return list(data)


def without(data: list[Tensor], *places: int) -> list[Tensor]:
    return [batch for place, batch in enumerate(data) if place not in places]


def fit(data: list[Tensor], *callbacks: Callback, model: Any = None, **options: Any) -> _Net:
    model = model or _Net()
    trainer(*callbacks, **options).fit(model, loader(data))
    return model


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)


def test_a_skipped_spike_leaves_no_trace() -> None:
    guard, spikes = SpikeGuard(window=5), {3: NAN, 8: 100.0, 9: 50.0, 15: float("inf")}
    with pytest.warns(UserWarning, match="A spike in epoch 0: a loss of nan") as told:
        found = fit(batches(spikes=spikes), guard, model=_Net(0.9))
    assert len([w for w in told if "spike" in str(w.message)]) == 1
    assert_equal(found, fit(without(batches(), *spikes), model=_Net(0.9)))
    assert guard.spikes == 4
    assert found.counted[-1] == 20


def test_before_the_window_is_full_only_what_is_not_finite_is_a_spike() -> None:
    guard = SpikeGuard(window=10)
    fit(batches(spikes={4: 100.0}), guard)
    assert guard.spikes == 0


@pytest.mark.parametrize("action", ["skip", "rollback"])
def test_a_clean_run_is_unchanged_to_the_bit(action: str) -> None:
    assert_equal(fit(batches(), SpikeGuard(action, window=3)), fit(batches()))


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("other", [None, NonFiniteGuard()])
def test_a_rollback_goes_on_from_the_snapshot(on_disk: bool, other: Callback | None, tmp_path: Path) -> None:
    """Snapshots before steps 0, 4, 8 and 12. The spike is batch 14, so steps 8 to 13 are taken back; then batch 15 is
    a spike too, and batches 16 to 23 are learnt from."""
    folder = str(tmp_path / "snapshots") if on_disk else None
    guard = SpikeGuard("rollback", window=5, snapshot_every=4, snapshot_folder=folder)
    callbacks = [guard] if other is None else [other, guard]
    with pytest.warns(UserWarning, match="the weights of 6 steps ago are restored"):
        found = fit(batches(spikes={14: 100.0, 15: NAN}), *callbacks)
    assert_equal(found, fit(without(batches(), *range(8, 16))))
    assert (guard.spikes, guard.taken_back, len(guard.state_dict()["recent"])) == (2, 6, 16)
    assert found.counted[-1] == 22  # steps that were taken back were steps; the two spikes were none
    assert list(tmp_path.rglob("*.pt")) == []


@pytest.mark.parametrize(("knows_its_length", "taken_back"), [(True, 5), (False, 50)])
def test_without_snapshot_every_it_goes_by_the_length_of_the_run(knows_its_length: bool, taken_back: int) -> None:
    """Batch 50 spikes: the snapshots are of 45 and 48 steps, or of 0 and 50."""
    guard, data = SpikeGuard("rollback"), batches(60, {50: 1e4})
    trainer(guard).fit(_Net(), loader(data) if knows_its_length else DataLoader(Stream(data), batch_size=None))
    assert (guard.spikes, guard.taken_back) == (1, taken_back)


class _Harmed(_Net):
    """The gradient of one batch is far too large, and its loss as any other."""

    harmed = 26

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + 1e6 * (loss - loss.detach()) if batch_idx == self.harmed else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def test_after_a_rollback_it_compares_with_the_losses_before_the_snapshot() -> None:
    """Those are about 100, so those of about 100 that follow are no spikes; beside the last ones, of 1, they would be.

    Batch 26 does the harm, batch 27 shows it; the snapshots are of steps 20 and 24, and the latter is 3 steps old."""
    data = batches(40, {place: 100.0 for place in range(40) if place not in (24, 25, 26)})
    guard = SpikeGuard("rollback", window=2, deviations=0, snapshot_every=4)
    found = fit(data, guard, model=_Harmed())
    assert (guard.spikes, guard.taken_back) == (1, 7)
    unharmed = _Harmed()
    unharmed.harmed = -1
    assert_equal(found, fit(without(data, *range(20, 28)), model=unharmed))


class _Fused(_Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05, fused=True)


def _fp16() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4))


@pytest.mark.parametrize("model", [_Net, _Fused])
@pytest.mark.parametrize("others", [[], [NonFiniteGuard()]])
def test_under_fp16_the_loss_is_unscaled_and_the_scaler_goes_on(model: type[_Net], others: list[Callback]) -> None:
    guard, net = SpikeGuard(window=5), model()
    fit(batches(spikes={12: 100.0}), guard, *others, model=net, plugins=[_fp16()])
    assert guard.spikes == 1
    assert net.counted[-1] == 23
    assert all(1.0 <= loss < 3.0 for loss in guard.state_dict()["recent"])


@pytest.mark.parametrize("fused_late", [False, True])
@pytest.mark.parametrize("action", ["skip", "rollback"])
def test_two_guards_count_a_step_that_both_skip_once(
    action: str, fused_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA the other guard learns of it a step later, when this one has undone it."""
    if fused_late:
        monkeypatch.setattr(non_finite_guard_run, "is_read_freely", lambda flag: False)
    guard, other = SpikeGuard(action, window=5, snapshot_every=4 if action == "rollback" else None), NonFiniteGuard()
    net = _Fused() if fused_late else _Net()
    found = fit(batches(spikes={14: NAN}), other, guard, model=net)
    gone = [14] if action == "skip" else range(8, 15)
    assert_equal(found, fit(without(batches(), *gone), model=type(net)()))
    assert found.counted[-1] == found.trainer.global_step == 23
    assert (other.skipped_steps, guard.spikes) == (1, 1)


def test_a_rollback_beside_pruning_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="ModelPruning, which renames parameters"):
        fit(batches(), SpikeGuard("rollback"), ModelPruning("l1_unstructured"))


def test_too_many_in_a_row_are_an_error() -> None:
    spikes = dict.fromkeys(range(10, 14), 100.0)
    fit(batches(spikes=spikes), SpikeGuard(window=5, max_in_a_row=4))
    with pytest.raises(DivergenceError, match="4 optimizer steps in a row had a loss that spikes"):
        fit(batches(spikes=spikes), SpikeGuard(window=5, max_in_a_row=3))


def test_its_state_and_what_is_logged() -> None:
    class Reads(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.seen = trainer.callback_metrics.get("loss_spikes")

    guard, reads = SpikeGuard(window=4), Reads()
    fit(batches(spikes={8: 100.0, 23: 100.0}), guard, reads, log_every_n_steps=1)
    assert float(reads.seen) == 2.0
    fresh = SpikeGuard(window=4)
    fresh.load_state_dict(guard.state_dict())
    assert fresh.state_dict() == guard.state_dict()
    assert guard.state_dict()["in_a_row"] == 1
    assert len(guard.state_dict()["recent"]) == 22


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"action": "stop"}, ValueError, "action='stop' is unknown"),
        ({"snapshot_every": 5}, ValueError, "have no effect here"),
        ({"snapshot_folder": "x"}, ValueError, "have no effect here"),
        ({"threshold": -1.0}, ValueError, r"threshold=-1\.0 must be 0 or more"),
        ({"threshold": "2"}, TypeError, "got str"),
        ({"margin": NAN}, ValueError, "margin=nan"),
        ({"deviations": -1}, ValueError, "deviations=-1 must be 0 or more"),
        ({"threshold": math.inf}, ValueError, "threshold=inf"),
        ({"window": 0}, ValueError, "window=0"),
        ({"action": "rollback", "snapshot_every": 1.5}, TypeError, r"snapshot_every=1\.5"),
    ],
)
def test_arguments_that_cannot_be_are_told(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        SpikeGuard(**arguments)

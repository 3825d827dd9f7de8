"""The switches in a Trainer against a run without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn

from lightning_speedkit.optimize.schedule_free import ScheduleFreeAdamW
from lightning_speedkit.optimize.schedule_free_switch import ScheduleFreeSwitch
from lightning_speedkit.optimize.spike_guard import SpikeGuard
from lightning_speedkit.optimize.weight_averaging import AverageWeights
from tests.conformance.models import Classifier, loader, quiet_trainer


class _Model(Classifier):
    """Keeps what validation saw, and its optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.validated: list[dict[str, Tensor]] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.validated.append(_weights(self))

    def configure_optimizers(self) -> ScheduleFreeAdamW:
        self.optimizer = ScheduleFreeAdamW(self.parameters(), lr=0.05, warmup_steps=4)
        return self.optimizer


def _weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def _equal(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def _fit(*callbacks: Callback, **arguments: Any) -> tuple[_Model, Any]:
    model, trainer = _Model(), quiet_trainer(list(callbacks), **{"max_epochs": 2, **arguments})
    torch.manual_seed(3)
    trainer.fit(model, loader(), loader())
    return model, trainer


def test_a_run_with_validation_equals_one_without_and_ends_with_the_average() -> None:
    plain, _ = _fit(limit_val_batches=0)  # without the switch: the training weights, as they come
    assert plain.optimizer.is_training
    model, _ = _fit(ScheduleFreeSwitch(), val_check_interval=2, num_sanity_val_steps=1)
    _equal(model.losses, plain.losses)
    plain.optimizer.eval()
    _equal(model.state_dict(), plain.state_dict())
    _equal(model.validated[-1], _weights(plain))
    assert len(model.validated) == 7
    assert not model.optimizer.is_training


class _Random(Callback):
    """Keeps the random state before the first batch of the second epoch, or sets it there."""

    def __init__(self, state: Tensor | None = None) -> None:
        self.state = state

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 6:
            if self.state is None:
                self.state = torch.get_rng_state()
            torch.set_rng_state(self.state)


@pytest.mark.parametrize("bare", [False, True])
def test_every_checkpoint_holds_the_average_and_a_whole_one_resumes_bit_for_bit(bare: bool, tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1, save_weights_only=bare)
    random = _Random()
    whole, _ = _fit(ScheduleFreeSwitch(), save, random, enable_checkpointing=True)
    for steps in (4, 6):  # inside an epoch and at its end
        stopped, _ = _fit(ScheduleFreeSwitch(), max_steps=steps)
        saved = torch.load(tmp_path / f"step={steps}.ckpt", weights_only=True)
        _equal({name: saved["state_dict"][name] for name in _weights(stopped)}, _weights(stopped))
    if not bare:
        resumed = _Model()
        trainer = quiet_trainer([ScheduleFreeSwitch(), _Random(random.state)], max_epochs=2)
        trainer.fit(resumed, loader(), loader(), ckpt_path=tmp_path / "step=6.ckpt")
        _equal(_weights(resumed), _weights(whole))
        assert len(resumed.losses) == 6


def test_an_exception_leaves_the_average() -> None:
    class Fails(_Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if len(self.losses) == 4:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    model = Fails()
    torch.manual_seed(3)
    with pytest.raises(ZeroDivisionError):
        quiet_trainer([ScheduleFreeSwitch()], max_epochs=1).fit(model, loader())
    stopped, _ = _fit(ScheduleFreeSwitch(), max_steps=4)
    _equal(_weights(model), _weights(stopped))


@pytest.mark.parametrize("kind", [EMAWeightAveraging, AverageWeights])
@pytest.mark.parametrize("order", [1, -1])
def test_a_second_average_is_refused_in_both_orders(kind: type[Callback], order: int) -> None:
    with pytest.raises(MisconfigurationException, match=f"{kind.__name__} and ScheduleFreeAdamW both average"):
        _fit(*[ScheduleFreeSwitch(), kind()][::order])


class _Spikes(_Model):
    """Keeps the weights of each training batch; the loss of the first batch of the third epoch is far too large."""

    def __init__(self) -> None:
        super().__init__()
        self.trained: list[dict[str, Tensor]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trained.append(_weights(self))
        return super().training_step(batch, batch_idx) * (1e6 if len(self.trained) == 13 else 1.0)


@pytest.mark.parametrize("order", [1, -1])
def test_a_snapshot_after_a_validation_holds_the_training_weights(order: int) -> None:
    guard = SpikeGuard("rollback", threshold=100.0, window=3, snapshot_every=6)  # at the start of each epoch
    model = _Spikes()
    trainer = quiet_trainer([guard, ScheduleFreeSwitch()][::order], max_epochs=3)
    with pytest.warns(UserWarning, match="the weights of 6 steps ago are restored"):
        trainer.fit(model, loader(), loader())
    _equal(model.trained[13], model.trained[6])

"""The callback against weights that are worked out by hand: the batches are 1, 2, 3, 4 and the learning rate is 1, so
the weight is 0, -2, -5, -9 after the steps of the first epoch, and -10, -12, -15, -19 after those of the second."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_speedkit.optimize.non_finite_guard import NonFiniteGuard
from lightning_speedkit.optimize.spike_guard import SpikeGuard
from lightning_speedkit.optimize.weight_averaging import AverageWeights
from tests.optimize.line import Line, Stream, batches_of, loader, trainer
from tests.two_ranks import on_two_ranks

FIRST, SECOND = [0.0, -2.0, -5.0, -9.0], [-10.0, -12.0, -15.0, -19.0]


class Watched(Line):
    """Keeps the weight that validation and training see."""

    def __init__(self) -> None:
        super().__init__(lr=1.0)
        self.validated: list[float] = []
        self.trained: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.trained.append(self.w.item())
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validated.append(self.w.item())

    def on_validation_epoch_end(self) -> None:  # where samples are drawn and confusion matrices are made
        self.validated.append(self.w.item())


def _fit(*callbacks: Callback, model: Any = None, path: Path | None = None, **options: Any) -> Any:
    model = model or Watched()
    run = trainer(*callbacks, num_sanity_val_steps=1, **options)
    run.fit(model, loader(batches_of(1, 1, 1, 1)), loader(batches_of(1)), ckpt_path=path, weights_only=True)
    return model, run


@pytest.mark.parametrize(
    ("arguments", "options", "expected"),
    [
        ({"by": "swa"}, {}, sum(FIRST) / 4),
        ({"by": "swa", "start": 2}, {}, -7.0),
        ({"by": "swa", "every": 2}, {}, -2.5),
        ({"by": "swa", "every": 3, "start": 1}, {"max_epochs": 2}, (-2 - 10 - 19) / 3),
        ({"by": "swa", "start": 0.5}, {"max_epochs": 2}, sum(SECOND) / 4),
        ({"by": "swa", "unit": "epoch"}, {"max_epochs": 2}, -14.0),
        ({"by": "swa", "unit": "epoch", "start": 0.75}, {"max_epochs": 2}, -14.0),
        ({"decay": 0.5, "warmup": False}, {}, -6.0),
        ({"decay": 0.0}, {}, -9.0),
        ({"by": "swa"}, {"accumulate_grad_batches": 2}, (-0.5 - 4.0) / 2),
        ({"by": "swa", "device": "cpu"}, {"max_steps": 3, "max_epochs": -1}, (0 - 2 - 5) / 3),
    ],
)
def test_the_module_ends_with_the_average(arguments: dict[str, Any], options: dict[str, Any], expected: float) -> None:
    model, _ = _fit(AverageWeights(**arguments), **options)
    assert model.w.item() == pytest.approx(expected, rel=1e-14)


def test_where_lightning_is_right_the_average_is_the_same() -> None:
    ours, _ = _fit(AverageWeights(decay=0.9, warmup=False), max_epochs=2)
    theirs, _ = _fit(EMAWeightAveraging(decay=0.9), max_epochs=2)
    assert ours.w.item() == pytest.approx(theirs.w.item(), rel=1e-14)


def test_training_goes_on_from_its_own_weights_and_validation_sees_the_average() -> None:
    model, _ = _fit(AverageWeights("swa", start=2), max_epochs=2, val_check_interval=2)
    assert model.trained == [1.0, *FIRST, *SECOND[:-1]]
    # the sanity check, then before the first update, after 2, 4 and 6 updates less the two of the start
    assert model.validated[::2] == pytest.approx([1.0, -2.0, -7.0, (-5 - 9 - 10 - 12) / 4, (-5 - 9 + sum(SECOND)) / 6])
    assert model.validated[::2] == model.validated[1::2]


def test_an_epochs_update_comes_before_its_validation() -> None:
    model, _ = _fit(AverageWeights("swa", unit="epoch"), max_epochs=2)
    assert model.validated[::2] == [1.0, -9.0, -14.0]


class _StopsEarly(Watched):
    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None


def test_an_epoch_that_ends_early_counts() -> None:
    model, _ = _fit(AverageWeights("swa", unit="epoch"), model=_StopsEarly())
    assert model.w.item() == -2.0
    model = Watched()
    trainer(AverageWeights("swa", unit="epoch")).fit(model, DataLoader(Stream(batches_of(1, 1)), batch_size=None))
    assert model.w.item() == -2.0


def test_a_start_that_is_never_reached_loses_nothing() -> None:
    with pytest.warns(UserWarning, match="will make no average: its start comes after 100 steps"):
        model, _ = _fit(AverageWeights(start=100))
    assert model.w.item() == -9.0
    assert model.validated[-1] == -9.0
    reference, _ = _fit(EMAWeightAveraging(update_starting_at_step=100))
    assert reference.w.item() == 1.0  # what Lightning makes of it: if this fails, Lightning has mended it


@pytest.mark.parametrize(("epochs", "updates"), [(2, 2), (3, 2), (4, 2), (12, 3)])
def test_the_last_quarter_is_two_epochs_at_least(epochs: int, updates: int) -> None:
    average = AverageWeights("swa", unit="epoch", start=0.75)
    _fit(average, max_epochs=epochs)
    assert average.updates == updates


def test_a_device_that_is_not_here_is_refused_at_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"device='meta' is not here, or keeps nothing .* Use 'cpu'"):
        _fit(AverageWeights(device="meta"))  # stands for a CUDA device: torch cannot keep a number there either


class _BadSecondBatch(Watched):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (float("nan") if batch_idx == 1 else 1.0)


@pytest.mark.parametrize("guard", [NonFiniteGuard, SpikeGuard])
@pytest.mark.parametrize("order", [1, -1])
def test_a_step_that_a_guard_skips_is_no_step_in_either_order(guard: type[Callback], order: int) -> None:
    with pytest.warns(UserWarning, match="step is skipped"):
        model, _ = _fit(*[AverageWeights("swa"), guard()][::order], model=_BadSecondBatch())
    assert model.w.item() == pytest.approx((0.0 - 3.0 - 7.0) / 3, rel=1e-14)


class _FailsInValidation(Watched):
    def on_validation_epoch_end(self) -> None:
        if len(self.validated) == 3:  # of the sanity check, and of two epochs
            raise ZeroDivisionError


def test_an_exception_in_validation_gives_the_weights_back(tmp_path: Path) -> None:
    model = _FailsInValidation()
    with pytest.raises(ZeroDivisionError):
        _fit(
            OnExceptionCheckpoint(tmp_path, "a"),
            AverageWeights("swa"),
            model=model,
            max_epochs=2,
            enable_checkpointing=True,
        )
    assert model.validated[-1] == (sum(FIRST) + sum(SECOND)) / 8
    assert model.w.item() == -19.0
    _assert_holds(torch.load(tmp_path / "a.ckpt"), live=-19.0, average=(sum(FIRST) + sum(SECOND)) / 8)


def _assert_holds(checkpoint: dict[str, Any], live: float, average: float) -> None:
    assert checkpoint["state_dict"]["w"].item() == pytest.approx(average)
    assert checkpoint["current_model_state"]["w"].item() == live


class _Saves(Callback):
    """Saves a checkpoint in every hook from which one might."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _save(self, run: Any, name: str) -> None:
        if not run.sanity_checking:
            run.save_checkpoint(self.folder / f"{name}.ckpt")

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        if trainer.global_step == 4:
            self._save(trainer, "batch")

    def on_validation_start(self, trainer: Any, *rest: Any) -> None:
        self._save(trainer, "start")

    def on_validation_batch_end(self, trainer: Any, *rest: Any) -> None:
        self._save(trainer, "inside")

    def on_validation_epoch_end(self, trainer: Any, *rest: Any) -> None:
        self._save(trainer, "epoch")

    def on_validation_end(self, trainer: Any, *rest: Any) -> None:
        self._save(trainer, "end")

    def on_train_epoch_end(self, trainer: Any, *rest: Any) -> None:
        self._save(trainer, "train_epoch")

    def on_train_end(self, trainer: Any, *rest: Any) -> None:
        self._save(trainer, "train_end")


@pytest.mark.parametrize("first", [True, False])
def test_a_checkpoint_is_right_wherever_it_is_saved(tmp_path: Path, first: bool) -> None:
    callbacks = [_Saves(tmp_path), AverageWeights("swa")]
    _, run = _fit(*(callbacks if first else callbacks[::-1]))
    run.save_checkpoint(tmp_path / "after.ckpt")
    names = {path.stem for path in tmp_path.iterdir()}
    assert names == {"batch", "start", "inside", "epoch", "end", "train_epoch", "train_end", "after"}
    for name in names - ({"batch"} if first else set()):  # there the last update was not made yet
        _assert_holds(torch.load(tmp_path / f"{name}.ckpt"), live=-9.0, average=-4.0)
    _assert_holds(torch.load(tmp_path / "batch.ckpt"), live=-9.0, average=-7 / 3 if first else -4.0)


class _Net(Watched):
    """A BatchNorm and momentum, in 16 bits: what has to come back exactly is more than one number."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(1, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).to(dtype)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = torch.stack([batch, batch + 1.0]).to(self.net[0].weight)
        return self.net(x).square().mean() + 0.0 * self.w

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


@pytest.mark.parametrize("arguments", [{"decay": 0.99, "every": 3}, {"by": "swa", "unit": "epoch", "start": 1}])
@pytest.mark.parametrize("name", ["inside", "after"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_ends_as_the_unbroken_one(
    tmp_path: Path, arguments: dict[str, Any], name: str, dtype: torch.dtype
) -> None:
    unbroken, again = AverageWeights(**arguments), AverageWeights(**arguments)
    whole, _ = _fit(unbroken, model=_Net(dtype), max_epochs=4)
    _, run = _fit(AverageWeights(**arguments), _Saves(tmp_path), model=_Net(dtype), max_epochs=2)
    run.save_checkpoint(tmp_path / "after.ckpt")
    resumed, _ = _fit(again, model=_Net(dtype), path=tmp_path / f"{name}.ckpt", max_epochs=4)
    torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), rtol=0, atol=0)
    kept = [callback.state_dict() for callback in (again, unbroken)]  # float32 averages of bfloat16, too
    assert kept[0]["last"] == kept[1]["last"]
    torch.testing.assert_close(kept[0]["widened"], kept[1]["widened"], rtol=0, atol=0)
    assert len(kept[0]["widened"]) == (8 if dtype == torch.bfloat16 else 0)


def test_checkpoints_go_to_and_fro_between_lightning_and_the_kit(tmp_path: Path) -> None:
    for number, (first, second) in enumerate(
        [(WeightAveraging(), AverageWeights("swa")), (AverageWeights("swa"), WeightAveraging())]
    ):
        folder = tmp_path / str(number)
        _fit(first, _Saves(folder))
        model, _ = _fit(second, path=folder / "train_epoch.ckpt", max_epochs=2)
        assert model.w.item() == pytest.approx((sum(FIRST) + sum(SECOND)) / 8)


def test_a_plain_checkpoint_starts_an_average_and_a_second_fit_starts_anew(tmp_path: Path) -> None:
    _fit(_Saves(tmp_path))
    callback = AverageWeights("swa")
    model, run = _fit(callback, path=tmp_path / "train_epoch.ckpt", max_epochs=2)
    assert model.w.item() == sum(SECOND) / 4
    run.validate(model, loader(batches_of(1)), verbose=False)
    assert model.validated[-1] == sum(SECOND) / 4
    other, _ = _fit(callback)
    assert other.w.item() == -4.0


class _Layers(Watched):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(1, 8), nn.Linear(8, 8), nn.Linear(8, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch.float()[:, None]).square().mean() + 0.0 * self.w

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.001)


def _zeros(model: Any) -> float:
    return (model.net[1].weight == 0).float().mean().item()


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("at_epoch_end", [True, False])
def test_beside_pruning_the_average_is_as_sparse_as_the_model(tmp_path: Path, order: int, at_epoch_end: bool) -> None:
    def callbacks() -> list[Callback]:
        pruning = ModelPruning(
            "l1_unstructured",
            amount=0.5,
            parameter_names=["weight"],
            use_lottery_ticket_hypothesis=False,
            prune_on_train_epoch_end=at_epoch_end,
            use_global_unstructured=False,
        )
        return [AverageWeights("swa"), pruning, _Saves(tmp_path)][::order]

    model, _ = _fit(*callbacks(), model=_Layers(), max_epochs=2)
    assert _zeros(model) == pytest.approx(0.75)
    saved = torch.load(tmp_path / "train_epoch.ckpt")
    assert not any("_orig" in name for name in saved["state_dict"])
    assert not torch.equal(saved["state_dict"]["net.1.weight"], saved["current_model_state"]["net.1.weight"])
    assert (saved["state_dict"]["net.1.weight"] == 0).float().mean() >= 0.5
    resumed, _ = _fit(AverageWeights("swa"), model=_Layers(), path=tmp_path / "train_epoch.ckpt", max_epochs=3)
    assert torch.isfinite(resumed.net[1].weight).all()


def _on_a_rank() -> Any:
    class Seen(AverageWeights):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            super().on_train_end(trainer, pl_module)
            self.saved = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)

    callback, model = Seen("swa"), Watched()
    run = trainer(callback, strategy="ddp", devices=2, num_sanity_val_steps=1)
    run.fit(model, loader(batches_of(1, 1, 1, 1, 1, 1, 1, 1)), loader(batches_of(1, 1)))
    return model.w.item(), model.validated, model.trained, callback.saved["current_model_state"]["w"].item()


def test_two_ranks_have_the_same_average() -> None:
    # the ranks take 1, 3, 5, 7 and 2, 4, 6, 8, in an order of their own: pairs of a mean gradient
    first, second = on_two_ranks(_on_a_rank)
    assert first == second
    average, validated, trained, live = first
    assert live == 1.0 - 4.5 * 4
    assert validated[-1] == average
    assert trained[0] == 1.0
    assert len(trained) == 4  # the weights before each step
    assert average == pytest.approx((sum(trained[1:]) + live) / 4, rel=1e-14)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"by": "mean"}, "'swa'"),
        ({"decay": 1.5}, "decay=1.5"),
        ({"unit": "batch"}, "'step'"),
        ({"every": 0}, "every=0"),
        ({"every": True}, "every=True"),
        ({"start": -1}, "start=-1"),
        ({"start": 1.0}, "share of the run"),
        ({"start": float("nan")}, "share of the run"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AverageWeights(**arguments)


@pytest.mark.parametrize(
    "other", [AverageWeights(decay=0.5), WeightAveraging(), EMAWeightAveraging(), StochasticWeightAveraging(0.1)]
)
def test_two_averages_are_refused(other: Callback) -> None:
    if isinstance(other, AverageWeights):  # Lightning itself refuses two of one class and state
        other.__class__ = type("Other", (AverageWeights,), {})
    with pytest.raises(MisconfigurationException, match="both put an average"):
        _fit(AverageWeights(), other)


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="number of its epochs is not known"):
        _fit(AverageWeights(unit="epoch", start=0.5), max_epochs=-1, max_steps=3)
    run = trainer(AverageWeights())
    run.strategy.__class__ = type("Sharded", (DDPStrategy.__mro__[1],), {})
    with pytest.raises(MisconfigurationException, match="does not work with Sharded"):
        run.callbacks[-1].setup(run, Watched(), "fit")  # type: ignore[attr-defined]


def test_weights_only_checkpoints_are_told_of(tmp_path: Path) -> None:
    def set_up(only: bool) -> None:
        save = ModelCheckpoint(tmp_path, save_weights_only=only)
        AverageWeights().setup(trainer(save, enable_checkpointing=True), Watched(), "fit")

    with pytest.warns(UserWarning, match="save_weights_only=True"):
        set_up(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        set_up(False)

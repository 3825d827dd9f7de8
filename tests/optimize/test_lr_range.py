"""The range test against a plain loop, and a run with it against one without: they have to be the same to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_speedkit.optimize.lr_range import LRRangeTest
from tests.optimize.line import Stream, trainer
from tests.two_ranks import on_two_ranks

SHORT: dict[str, Any] = {"lowest": 1e-4, "highest": 1.0, "steps": 9, "divergence": 1e9}


class Net(LightningModule):
    """Dropout, BatchNorm, a metric, counters, logging, two parameter groups and a schedule."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2))
        self.head, self.mean, self.losses = nn.Linear(8, 1), MeanMetric(), []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = (self.head(self.body(x)) - y).square().mean()
        self.mean.update(loss)
        self.log("loss", loss)
        self.log_dict({"mean": self.mean}, on_epoch=True, on_step=False)
        self.losses.append(loss.item())
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.body.parameters(), "lr": 0.002}, {"params": self.head.parameters()}]
        optimizer = torch.optim.AdamW(groups, lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def _data() -> TensorDataset:
    x = torch.randn(20, 2, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True) + 2.0)


class Data(LightningDataModule):
    def train_dataloader(self) -> Any:
        torch.rand(3)
        return DataLoader(_data(), batch_size=4, shuffle=True)


class AsksForSteps(Net):
    """Lets Lightning make its loaders, and their first random numbers, before the test."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()


def _run(*callbacks: Callback, model: Net | None = None, data: Any = None, **options: Any) -> Any:
    model = model or Net()
    data = DataLoader(_data(), batch_size=4, shuffle=True) if data is None else data
    torch.manual_seed(9)
    run = trainer(*callbacks, **{"max_epochs": 2, **options})
    run.fit(model, data)
    state = {
        "weights": model.state_dict(),
        "losses": model.losses,
        "optimizer": run.optimizers[0].state_dict(),
        "step": (run.global_step, run.current_epoch, run.callback_metrics),
        "random": torch.get_rng_state(),
    }
    return state, run


def _stream() -> Any:
    return DataLoader(Stream([tuple(t.split(4)[i] for t in _data().tensors) for i in range(5)]), batch_size=None)


def _persistent() -> Any:
    return DataLoader(
        _data(), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    )


@pytest.mark.parametrize(
    ("model", "data", "options"),
    [
        (Net, None, {}),
        (AsksForSteps, None, {}),
        (Net, Data, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
        (AsksForSteps, _persistent, {}),
        (Net, None, {"plugins": 1024.0}),
        (Net, _stream, {}),
        (Net, lambda: {"a": DataLoader(_data(), 4), "b": DataLoader(_data(), 5)}, {"limit_train_batches": 3}),
    ],
    ids=["plain", "loaders made before", "datamodule", "persistent workers", "float16", "stream", "two loaders"],
)
def test_a_run_with_the_test_is_the_run_without(model: Any, data: Any, options: dict[str, Any]) -> None:
    states = []
    for tested in (False, True):
        module = model()
        if data is not None and data.__name__ == "<lambda>":
            module.training_step = lambda batch, batch_idx, m=module: Net.training_step(m, batch["a"], batch_idx)
        given = dict(options)
        if "plugins" in given:
            given["plugins"] = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", options["plugins"]))]
        test = LRRangeTest(**SHORT)
        state, run = _run(*[test] * tested, model=module, data=data and data(), **given)
        scaler = getattr(run.precision_plugin, "scaler", None)
        states.append({**state, "scaler": scaler and scaler.state_dict()})
        if tested:
            assert test.result is not None
            assert len(test.result.losses) == 9
    for name, value in states[0].items():
        assert _same(states[1][name], value), name


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


class _Counts(Callback):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        return {"calls": len(self.calls)}

    def on_before_backward(self, *rest: Any) -> None:
        self.calls.append("backward")

    def on_before_optimizer_step(self, *rest: Any) -> None:
        self.calls.append("step")


def test_loggers_other_callbacks_and_files_see_nothing_of_it(tmp_path: Path) -> None:
    seen = []
    for tested in (False, True):
        folder, counts = tmp_path / str(tested), _Counts()
        logger, save = CSVLogger(folder, version="v"), ModelCheckpoint(folder, save_top_k=-1)
        tests = [LRRangeTest(**SHORT)] * tested
        _run(*tests, counts, save, logger=logger, enable_checkpointing=True, log_every_n_steps=1)
        assert counts.calls == ["backward", "step"] * 10
        files = sorted(path.relative_to(folder) for path in folder.rglob("*"))
        seen.append((files, (folder / "lightning_logs" / "v" / "metrics.csv").read_text()))
    assert seen[0] == seen[1]


def _plain(rates: list[float], accumulate: int = 1) -> list[float]:
    """The losses of a plain loop at those rates, the body's being a tenth; without dropout."""
    model = NoDropout()
    optimizer = model.configure_optimizers()[0][0]
    batches = list(DataLoader(_data(), batch_size=4)) * 10
    losses = []
    for rate in rates:
        optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = 0.1 * rate, rate
        optimizer.zero_grad()
        found = [
            (model.head(model.body(x)) - y).square().mean() for x, y in (batches.pop(0) for _ in range(accumulate))
        ]
        torch.stack(found).mean().backward()
        optimizer.step()
        losses.append(torch.stack(found).mean().item())
    return losses


class NoDropout(Net):
    def __init__(self) -> None:
        super().__init__()
        self.body[3].p = 0.0


@pytest.mark.parametrize("accumulate", [1, 2])
def test_its_losses_are_those_of_a_plain_loop(accumulate: int) -> None:
    test = LRRangeTest(**SHORT)
    _run(test, model=NoDropout(), data=DataLoader(_data(), batch_size=4), accumulate_grad_batches=accumulate)
    assert test.result is not None
    rates = [10.0 ** (-4 + x / 2) for x in range(9)]
    assert test.result.rates == pytest.approx(rates)
    assert test.result.ratios == pytest.approx([0.1, 1.0])
    assert test.result.losses == pytest.approx(_plain(list(test.result.rates), accumulate), rel=1e-5)


class _SkipsSome(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (
            None if len(self.losses) == 2 and not self.losses.append(0.0) else super().training_step(batch, batch_idx)
        )


def test_a_step_without_a_loss_is_no_point_of_the_curve() -> None:
    test = LRRangeTest(**SHORT)
    _run(test, model=_SkipsSome())
    assert test.result is not None
    assert len(test.result.losses) == 8


def test_apply_multiplies_every_rate_and_its_schedule(tmp_path: Path) -> None:
    test = LRRangeTest(1e-6, 10.0, 60, apply=True, plot=str(tmp_path / "curve.svg"))
    _, run = _run(test, max_steps=0)
    assert test.result is not None
    rate = test.result.suggestion
    assert rate is not None
    assert [group["lr"] for group in run.optimizers[0].param_groups] == pytest.approx([0.1 * rate, rate])
    assert run.lr_scheduler_configs[0].scheduler.base_lrs == pytest.approx([0.1 * rate, rate])
    assert (tmp_path / "curve.svg").stat().st_size > 1000
    with pytest.warns(UserWarning, match="no rate at which the loss clearly falls"):
        _, run = _run(LRRangeTest(1e-12, 1e-11, 5, apply=True), max_steps=0)
    assert run.optimizers[0].param_groups[1]["lr"] == 0.02


class _Fails(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(self.losses) == 3:
            raise ZeroDivisionError
        return super().training_step(batch, batch_idx)


def test_after_an_exception_all_is_as_before() -> None:
    model, callback = _Fails(), LRRangeTest(**SHORT)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run = trainer(callback, logger=[CSVLogger("logs")])
    state, callbacks, loggers = torch.get_rng_state(), run.callbacks, run.loggers  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError):
        run.fit(model, DataLoader(_data(), batch_size=4))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    torch.testing.assert_close(torch.get_rng_state(), state, rtol=0, atol=0)
    assert model.losses == []
    assert (run.callbacks, run.loggers) == (callbacks, loggers)  # type: ignore[attr-defined]
    assert "log" not in vars(model)
    assert run.train_dataloader is None


def test_a_resumed_run_is_not_tested(tmp_path: Path) -> None:
    _, run = _run()
    run.save_checkpoint(tmp_path / "a.ckpt")
    test = LRRangeTest(**SHORT)
    trainer(test, max_epochs=3).fit(Net(), DataLoader(_data(), batch_size=4), ckpt_path=tmp_path / "a.ckpt")
    assert test.result is None
    _run(test, limit_train_batches=0)
    assert test.result is None


def _on_a_rank(tested: bool) -> Any:
    test = LRRangeTest(1e-6, 1e6, 30)
    state, run = _run(*[test] * tested, strategy="ddp", devices=2)
    assert run.world_size == 2
    return state["weights"], state["losses"], test.result


def _on_a_rank_both() -> Any:
    return [_on_a_rank(tested) for tested in (False, True)]


def test_two_ranks_agree_and_train_as_without_it() -> None:
    ranks = on_two_ranks(_on_a_rank_both)
    for plain, tested in ranks:
        torch.testing.assert_close(tested[:2], plain[:2], rtol=0, atol=0)
    curve = ranks[0][1][2]
    assert curve == ranks[1][1][2]
    assert curve.diverged
    assert len(curve.losses) < 30


class _Manual(Net):
    automatic_optimization = False  # type: ignore[assignment]


class _Iterates(Net):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return super().training_step(next(dataloader_iter)[0], 0)


class _NoOptimizer(Net):
    def configure_optimizers(self) -> Any:
        return None


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (_Manual, "automatic_optimization = False"),
        (_Iterates, "dataloader_iter"),
        (_NoOptimizer, "needs one optimizer"),
    ],
)
def test_what_cannot_be_tested_is_refused(model: Any, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        _run(LRRangeTest(**SHORT), model=model())


def test_batches_that_come_once_are_told() -> None:
    with pytest.raises(ValueError, match="gives each of them once"):
        _run(LRRangeTest(**SHORT), data=iter(DataLoader(_data(), batch_size=4)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lowest": 0.0}, "lowest=0.0"),
        ({"lowest": 1.0, "highest": 0.1}, "the first one smaller"),
        ({"highest": float("inf")}, "highest=inf"),
        ({"steps": 4}, "steps=4"),
        ({"steps": 10.0}, "steps=10.0"),
        ({"divergence": 1.0}, "divergence=1.0"),
        ({"plot": "curve.pdf"}, "plot='curve.pdf'"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LRRangeTest(**arguments)
    with pytest.raises(TypeError, match=r"lowest='1e-7' must be a number; got str. .*: 1.0e-07\."):
        LRRangeTest(lowest="1e-7")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="apply='no' must be true or false"):
        LRRangeTest(apply="no")  # type: ignore[arg-type]

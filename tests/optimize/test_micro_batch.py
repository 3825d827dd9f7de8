"""The callback in one process: where memory runs out, and who else is in the Trainer, changes nothing."""

from __future__ import annotations

import ctypes
import resource
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from lightning_speedkit.optimize.accumulate import AccumulationScheduler
from lightning_speedkit.optimize.micro_batch import AutoMicroBatch
from tests.optimize.line import trainer
from tests.optimize.scarce_memory import MESSAGE, Scarce, batches, fit, loader, plain, weights
from tests.preloaded import run_forked

SIZES = (8, 8, 5, 8, 3, 7)
FAULTS = {
    "forward": {"forward_most": 3},
    "backward": {"backward_most": 3},
    "both": {"forward_most": 5, "backward_most": 2},
}


def _scarce(fault: str = "none", dtype: torch.dtype = torch.float64) -> Scarce:
    model = Scarce(dtype)
    for name, value in FAULTS.get(fault, {}).items():
        setattr(model, name, value)
    return model


@pytest.mark.parametrize("fault", FAULTS)
def test_the_steps_are_those_of_whole_batches(fault: str) -> None:
    model, callback = _scarce(fault), AutoMicroBatch()
    fit(model, batches(*SIZES), callback, max_epochs=2)
    torch.testing.assert_close(weights(model), plain([[b] for b in batches(*SIZES)], 2), rtol=1e-12, atol=0)
    most = {"forward": 2, "backward": 2, "both": 2}[fault]
    assert callback.micro_batch_size == most
    first_that_fits = next(i for i, samples in enumerate(model.calls) if samples <= most)
    assert all(samples <= most for samples in model.calls[first_that_fits:])  # it remembers
    assert set(model.graphs_alive) == {0}  # a graph that failed is gone when the next one is built


@pytest.mark.parametrize("fault", FAULTS)
def test_accumulation_weighs_batches_and_not_pieces(fault: str) -> None:
    data = batches(*SIZES)
    model = fit(_scarce(fault), data, AutoMicroBatch(), AccumulationScheduler(4), gradient_clip_val=0.05)
    expected = plain([data[:4], data[4:]], clip=0.05)
    torch.testing.assert_close(weights(model), expected, rtol=1e-4, atol=0)  # clip_grad_norm_ adds 1e-6 to the norm
    for callbacks in ([AutoMicroBatch(), AccumulationScheduler(3)], [AccumulationScheduler(3), AutoMicroBatch()]):
        model = fit(_scarce(fault), data, *callbacks)
        torch.testing.assert_close(weights(model), plain([data[:3], data[3:]]), rtol=1e-12, atol=0)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_gradient_scaler_sees_scaled_gradients(fault: str) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    data = batches(*SIZES)
    model = fit(_scarce(fault), data, AutoMicroBatch(), AccumulationScheduler(2), plugins=[plugin])
    expected = plain([data[:2], data[2:4], data[4:]])  # autocast leaves double precision alone
    torch.testing.assert_close(weights(model), expected, rtol=1e-12, atol=0)
    assert scaler.get_scale() == 2048.0


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3}, {"precision": "bf16-mixed"}], ids=str)
def test_without_a_fault_everything_is_the_same_to_the_bit(options: Any) -> None:
    data = batches(*SIZES, dtype=torch.float32)
    expected = fit(_scarce(dtype=torch.float32), data, validate=True, **options)
    random = torch.get_rng_state()
    found = fit(_scarce(dtype=torch.float32), data, AutoMicroBatch(), validate=True, **options)
    torch.testing.assert_close(weights(found), weights(expected), rtol=0, atol=0)
    assert found.metrics == expected.metrics
    assert torch.equal(torch.get_rng_state(), random)
    assert vars(found).keys() == vars(expected).keys()


def test_validation_in_pieces_logs_the_mean_over_samples() -> None:
    expected = fit(_scarce(), batches(4), validate=True)
    model, callback = _scarce(), AutoMicroBatch()
    model.validation_most = 2
    fit(model, batches(4), callback, validate=True)
    assert model.metrics["val"] == pytest.approx(expected.metrics["val"], rel=1e-6)
    assert callback.micro_batch_size is None  # of training
    run = trainer(AutoMicroBatch(), num_sanity_val_steps=0)
    (alone,) = run.validate(model, loader(batches(6, 4)), verbose=False)
    assert alone["val"] == pytest.approx(expected.metrics["val"], rel=1e-6)


class _FailingAdam(torch.optim.AdamW):
    """Its second step updates the weights and then finds no memory, once."""

    failed = 0

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.state[self.param_groups[0]["params"][0]].setdefault("count", torch.zeros(())).add_(1)
        if self.state[self.param_groups[0]["params"][0]]["count"] == 2 and not _FailingAdam.failed:
            _FailingAdam.failed += 1
            raise torch.OutOfMemoryError(MESSAGE)
        return result


def test_a_step_that_fails_half_way_is_undone_and_a_schedule_goes_on() -> None:
    _FailingAdam.failed = 0
    data, runs = batches(*SIZES), []
    for kind in (torch.optim.AdamW, _FailingAdam):
        model = _scarce()

        def configure(parameters: Any, kind: Any = kind) -> Any:
            optimizer = kind(parameters, lr=0.1)
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]

        model.optimizer = configure
        with pytest.warns(UserWarning, match="was repeated") if kind is _FailingAdam else nullcontext():
            fit(model, data, AutoMicroBatch())
        runs.append(weights(model))
    assert _FailingAdam.failed == 1
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-12, atol=0)


def test_it_tries_to_grow_back() -> None:
    model, callback = _scarce("forward"), AutoMicroBatch(grow_after=2)

    class Frees(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 4:
                model.forward_most = float("inf")

    fit(model, batches(*[8] * 14), callback, Frees())
    assert callback.micro_batch_size == 8
    assert model.calls[-1] == 8
    torch.testing.assert_close(weights(model), plain([[b] for b in batches(*[8] * 14)]), rtol=1e-12, atol=0)


def test_one_sample_that_does_not_fit_ends_the_run_and_leaves_no_trace() -> None:
    model, callback = _scarce(), AutoMicroBatch()
    model.backward_most = 0
    run = trainer(callback)
    before = (dict(vars(run.strategy)), dict(vars(run.precision_plugin)))
    with pytest.raises(torch.OutOfMemoryError, match=r"backward pass ran out of memory with 1 sample .*precision"):
        run.fit(model, loader(batches(8)))
    assert model.calls == [8, 4, 2, 1]
    for owner, found in zip((run.strategy, run.precision_plugin), before, strict=True):
        assert not {"training_step", "validation_step", "test_step", "backward"} & (vars(owner).keys() - found.keys())
    assert "step" not in vars(run.optimizers[0])
    assert "training_step" not in vars(model)
    assert "log" not in vars(model)


class _Tokens(Scarce):
    """The loss is a mean over labels, and a batch is a list of samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = torch.stack([row["x"] for row in batch])
        wanted = torch.stack([row["labels"] for row in batch]) != -100
        if len(x) > 3:
            raise MemoryError
        return (self.second(torch.tanh(self.first(x))).square() * wanted).sum() / wanted.sum().clamp(min=1)


class _ByRows(AutoMicroBatch):
    def count_samples(self, batch: Any) -> int:
        return len(batch)

    def split(self, batch: Any, size: int) -> list[Any]:
        return [batch[start : start + size] for start in range(0, len(batch), size)]

    def weigh(self, piece: Any) -> Tensor:
        return sum((row["labels"] != -100).sum() for row in piece)  # type: ignore[return-value]


def test_batches_of_another_kind_by_overriding() -> None:
    data = [
        [{"x": x, "labels": torch.tensor([1 if i % 3 else -100])} for i, x in enumerate(batch)]
        for batch in batches(8, 5)
    ]
    model, whole = _Tokens(), _Tokens()
    fit(model, data, _ByRows())  # type: ignore[arg-type]
    optimizer = whole.configure_optimizers()
    for batch in data:
        x = torch.stack([row["x"] for row in batch if row["labels"] != -100])
        optimizer.zero_grad()
        whole.second(torch.tanh(whole.first(x))).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(weights(model), weights(whole), rtol=1e-12, atol=0)


def test_what_cannot_be_counted_or_cut_is_told_at_the_first_batch() -> None:
    with pytest.raises(ValueError, match="labels='labels'"):
        fit(_scarce(), batches(4), AutoMicroBatch(count="labels"))

    class Uneven(Scarce):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch[0], batch_idx)

    data = [(x, torch.zeros(3)) for x in batches(4, 4)]
    with pytest.warns(UserWarning, match="cannot compute this batch in pieces.*dimensions of 3 and 4") as told:
        model = fit(Uneven(), data, AutoMicroBatch())  # type: ignore[arg-type]
    assert model.calls == [4, 4]
    assert sum("in pieces" in str(w.message) for w in told) == 1


def test_losses_that_are_means_over_labels() -> None:
    callback = AutoMicroBatch(count="labels")
    batch = {"x": torch.zeros(4, 2), "labels": torch.tensor([[1, 2], [-100, -100], [3, -100], [4, 5]])}
    assert [int(callback.weigh(piece)) for piece in callback.split(batch, 2)] == [2, 3]
    assert AutoMicroBatch(count=len).weigh([1, 2, 3]) == 3


class _Sums(Scarce):
    def loss(self, x: Tensor) -> Tensor:
        return super().loss(x) * len(x)


def test_losses_that_are_sums() -> None:
    results = []
    for most in (float("inf"), 3):
        model = _Sums()
        model.forward_most = most
        results.append(weights(fit(model, batches(8, 5), AutoMicroBatch(reduction="sum"), gradient_clip_val=0.1)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=0)


def test_the_size_is_kept_in_a_checkpoint(tmp_path: Any) -> None:
    run = trainer(AutoMicroBatch(), max_epochs=1)
    run.fit(_scarce("forward"), loader(batches(8, 8)))
    run.save_checkpoint(tmp_path / "a.ckpt")
    model, callback = _scarce("forward"), AutoMicroBatch()
    trainer(callback, max_epochs=2).fit(model, loader(batches(8, 8)), ckpt_path=tmp_path / "a.ckpt")
    assert callback.micro_batch_size == 2
    assert set(model.calls) == {2}


class _LogsLoss(Scarce):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.1
        self.optimizer = lambda parameters: torch.optim.SGD(parameters, lr=self.lr, momentum=0.9)


def test_a_search_for_the_learning_rate_trains_too() -> None:
    """It trains inside the fit without the callbacks, while the steps are ours already."""
    rates = []
    for callbacks in ([], [AutoMicroBatch()]):
        model = _LogsLoss()
        finder = LearningRateFinder(num_training_steps=12, min_lr=0.01, max_lr=1.0, early_stop_threshold=None)
        fit(model, batches(*SIZES, *SIZES, *SIZES), *callbacks, finder)
        assert finder.optimal_lr is not None
        rates.append((finder.optimal_lr.results["loss"], weights(model)))
    assert len(set(rates[0][0])) > 6
    torch.testing.assert_close(rates[1], rates[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"smallest": 0}, "smallest=0 must be 1 or more"),
        ({"grow_after": 0}, "grow_after=0 must be 1 or more, or None"),
        ({"batch_dim": -1}, "batch_dim=-1 must be 0 or more"),
        ({"reduction": "max"}, "reduction='max' is unknown"),
        ({"step_copy_mib": -1.0}, "step_copy_mib=-1.0 must be 0 or more"),
        ({"step_copy_mib": "32"}, "step_copy_mib='32' must be 0 or more, a number"),
        ({"batch_dim": "0"}, "batch_dim='0' must be 0 or more"),
        ({"step_copy_mib": float("nan")}, "must be 0 or more"),
        ({"count": "batches"}, "count='batches' would weigh"),
        ({"count": "label"}, "Did you mean 'labels'"),
        ({"count": "labels", "reduction": "sum"}, "would have no effect"),
    ],
)
def test_arguments_out_of_range_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AutoMicroBatch(**options)


class _Deep(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(48)])
        self.sizes: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.sizes.append(len(batch))
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit_in_little_memory() -> None:
    ctypes.CDLL(None).mallopt(-3, 2**16)  # M_MMAP_THRESHOLD: what is freed goes back to the system
    torch.set_num_threads(1)
    data = torch.utils.data.DataLoader(torch.randn(2 * 2**14, 64), batch_size=2**14)  # type: ignore[arg-type]
    model, callback = _Deep(), AutoMicroBatch()  # 4 MiB for each activation
    run = trainer(callback, limit_train_batches=2)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 100 * 2**20,) * 2)
    run.fit(model, data)
    print("limit", callback.micro_batch_size, "sizes", *model.sizes)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc and RLIMIT_AS")
def test_real_memory_of_the_host_that_runs_out() -> None:
    """192 MiB of activations where 100 MiB are left, or fewer: a failed pass has to give its memory back.

    How many samples fit depends on the machine.
    """
    done = run_forked(_fit_in_little_memory, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    limit, sizes = done.stdout.split("limit")[1].split("sizes")
    first, *rest = [int(size) for size in sizes.split()]
    assert first == 2**14
    assert int(limit) < 2**14
    pieces = 2**14 // int(limit)
    assert rest[-pieces:] == [int(limit)] * pieces  # of the second batch, which is complete


@pytest.mark.parametrize("labels", ["labels", 1])
def test_a_place_of_labels_that_are_not_counted_is_an_error(labels: str | int) -> None:
    with pytest.raises(ValueError, match=r"has no effect with count='samples'. Pass count='labels'"):
        AutoMicroBatch(labels=labels)
    AutoMicroBatch(count="labels", labels=labels)

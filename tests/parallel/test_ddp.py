"""The strategy on two gloo processes, against Lightning's own DDP and against one process on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import DataLoader, TensorDataset

from lightning_speedkit.parallel import SpeedkitDDPStrategy
from tests.two_ranks import on_two_ranks

FACTORS = (1, 2, 3)
BATCHES = 7  # per rank: the last window is short for 2 and 3


class Net(LightningModule):
    """Sums the gradients of each batch; a branch may be left unused."""

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        self.branch = nn.Linear(3, 1).double() if unused else None
        self.storages: set[int] = set()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        self.storages = {gradient.untyped_storage().data_ptr() for gradient in gradients}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Manual(Net):
    """The same, with the steps written out."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def _data(batches: int = BATCHES) -> tuple[Tensor, Tensor]:
    x = torch.randn(4 * batches, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return x, x.sum(1, keepdim=True)


def _trainer(strategy: Any, *callbacks: Callback, **options: Any) -> Trainer:
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 2,
        "max_epochs": 2,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    return Trainer(strategy=strategy, callbacks=list(callbacks), use_distributed_sampler=False, **{**quiet, **options})


def _loader(rank: int) -> DataLoader[Any]:
    """Every other row, two at a time: the two ranks together see rows 0..3, 4..7, ..."""
    x, y = _data()
    return DataLoader(TensorDataset(x[rank::2], y[rank::2]), batch_size=2)


def _weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def _fit(strategy: Any, model: LightningModule | None = None, **options: Any) -> list[Tensor]:
    model, run = model or Net(), _trainer(strategy, **options)
    run.fit(model, _loader(run.global_rank))
    return _weights(model)


def _error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


class _Sends(Callback):
    """Counts the buckets of gradients that are sent."""

    def __init__(self) -> None:
        self.count = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        def hook(group, bucket):  # type: ignore[no-untyped-def]  # torch refuses other annotations than its own
            self.count += 1
            return default_hooks.allreduce_hook(group, bucket)

        trainer.strategy.model.register_comm_hook(None, hook)


def _twice(strategy: Any, make: Callable[[], LightningModule], **options: Any) -> list[list[Tensor]]:
    run, found = _trainer(strategy, max_epochs=1, **options), []
    for _ in range(2):
        model = make()
        run.fit_loop.epoch_progress.reset()
        run.fit(model, _loader(run.global_rank))
        found.append(_weights(model))
    return found


class Alternating(Net):
    """Leaves its branch out of every other batch, which are those that no step follows if two make a window."""

    def __init__(self) -> None:
        super().__init__(unused=True)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        assert self.branch is not None
        loss = super().training_step(batch, batch_idx)
        return loss + 0 * self.branch(batch[0]).mean() if batch_idx % 2 or self.trainer.is_last_batch else loss


class Later(Net):
    """Leaves its branch out from the third batch on."""

    def __init__(self) -> None:
        super().__init__(unused=True)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        assert self.branch is not None
        loss = super().training_step(batch, batch_idx)
        return loss + self.branch(batch[0]).mean() if batch_idx < 2 else loss


class Normed(Net):
    """Normalises over the batches of both ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(4).double())


class Single(Net):
    """Fits in 32 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.float()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step([value.float() for value in batch], batch_idx)


def _runs() -> dict[str, Any]:
    """Everything in one start of two processes, which is what takes the time."""
    found: dict[str, Any] = {}
    for factor in FACTORS:
        found[f"lightning {factor}"] = _fit("ddp", accumulate_grad_batches=factor)
        for name in ("speedkit_ddp", "speedkit_ddp_static"):
            sends = _Sends()
            found[f"{name} {factor}"] = _fit(name, accumulate_grad_batches=factor)
            _trainer(name, sends, accumulate_grad_batches=factor).fit(Net(), _loader(0))
            found[f"sends {name} {factor}"] = sends.count
    for as_view in (True, False):
        model = Net()
        found[f"view {as_view}"] = _fit(SpeedkitDDPStrategy(gradient_as_bucket_view=as_view), model)
        found[f"storages {as_view}"] = len(model.storages)
    found["static twice"] = _twice("speedkit_ddp_static", Net, accumulate_grad_batches=2)
    found["manual once"] = _fit("ddp", Manual(), max_epochs=1)
    found["manual twice"] = _twice("speedkit_ddp_static", Manual)
    found["unused found"] = _fit(SpeedkitDDPStrategy(find_unused_parameters=True), Net(unused=True))
    found["unused static"] = _fit("speedkit_ddp_static", Net(unused=True), accumulate_grad_batches=2)

    plain_hook, calls = default_hooks.fp16_compress_hook, []

    def fp16_compress_hook(group, bucket):  # type: ignore[no-untyped-def]
        calls.append(bucket.buffer().dtype)
        return plain_hook(group, bucket)

    default_hooks.fp16_compress_hook = fp16_compress_hook
    found["fp16"] = _fit(SpeedkitDDPStrategy(comm_hook="fp16"), accumulate_grad_batches=2)
    found["fp16 static"] = _fit(SpeedkitDDPStrategy(comm_hook="fp16", static_graph=True), accumulate_grad_batches=2)
    found["fp16 calls"] = len(calls)

    def failing(group, bucket):  # type: ignore[no-untyped-def]
        raise ArithmeticError("on purpose")

    found["alternating"] = _fit("speedkit_ddp", Alternating(), accumulate_grad_batches=2)
    found["auto"] = _fit(SpeedkitDDPStrategy(bucket_cap_mb="auto"), accumulate_grad_batches=2)
    norm = Normed()
    _fit("speedkit_ddp", norm, sync_batchnorm=True)
    found["norm classes"] = [type(layer).__name__ for layer in norm.net]
    found["norm"] = {name: value.detach() for name, value in norm.state_dict().items()}
    for factor in (1, 3):
        for name in ("speedkit_ddp", "speedkit_ddp_static"):
            found[f"single {name} {factor}"] = _fit(name, Single(), max_epochs=3, accumulate_grad_batches=factor)
    options = {"limit_train_batches": 1, "max_epochs": 1}
    found["unused in the only step"] = _error_of(lambda: _fit("speedkit_ddp", Net(unused=True), **options))
    found["unused later"] = _error_of(lambda: _fit("speedkit_ddp", Later()))
    found["unused"] = _error_of(lambda: _fit("speedkit_ddp", Net(unused=True)))
    default_hooks.fp16_compress_hook = failing
    found["failing"] = _error_of(lambda: _fit(SpeedkitDDPStrategy(comm_hook="fp16")))
    return found


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    return on_two_ranks(_runs)


def _plain(epochs: int = 2, batches_per_step: int = 1, model: Net | None = None) -> list[Tensor]:
    """One process on the rows of both ranks; divides by the factor also in the short window, as Lightning does."""
    model, (x, y) = model or Net(), _data()
    x, y = (value.to(next(model.parameters()).dtype) for value in (x, y))
    optimizer: Any = model.configure_optimizers()
    for _ in range(epochs):
        for start in range(0, BATCHES, batches_per_step):
            optimizer.zero_grad()
            for batch in range(start, min(start + batches_per_step, BATCHES)):
                rows = slice(4 * batch, 4 * batch + 4)
                (nn.functional.mse_loss(model.net(x[rows]), y[rows]) / batches_per_step).backward()
            optimizer.step()
    return _weights(model)


def _close(found: list[Tensor], expected: list[Tensor], rtol: float = 1e-9, atol: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("name", ["speedkit_ddp", "speedkit_ddp_static"])
def test_accumulation_equals_one_process_and_lightnings_ddp(runs: Any, name: str, factor: int) -> None:
    for rank in runs:
        _close(rank[f"{name} {factor}"], _plain(batches_per_step=factor))
        _close(rank[f"{name} {factor}"], rank[f"lightning {factor}"])


@pytest.mark.parametrize(
    ("name", "factor", "sends"),
    [
        # 2 epochs of 7, 4 and 3 steps; the first backward of a static graph sends too, unless it is a step's anyway
        ("speedkit_ddp", 1, 14),
        ("speedkit_ddp", 2, 8),
        ("speedkit_ddp", 3, 6),
        ("speedkit_ddp_static", 1, 14),
        ("speedkit_ddp_static", 2, 9),
        ("speedkit_ddp_static", 3, 7),
    ],
)
def test_gradients_are_sent_once_per_step(runs: Any, name: str, factor: int, sends: int) -> None:
    assert [rank[f"sends {name} {factor}"] for rank in runs] == [sends, sends]


def test_bucket_views_hold_the_gradients_once_and_change_no_weight(runs: Any) -> None:
    for rank in runs:
        assert rank["storages True"] == 1  # all gradients lie in the one bucket
        assert rank["storages False"] == 4  # each has memory of its own, beside the bucket
        assert all(torch.equal(a, b) for a, b in zip(rank["view True"], rank["view False"], strict=True))


def test_a_second_fit_on_a_static_graph(runs: Any) -> None:
    for rank in runs:
        for weights in rank["static twice"]:
            _close(weights, _plain(epochs=1, batches_per_step=2))


def test_a_second_fit_on_a_static_graph_with_manual_optimization(runs: Any) -> None:
    for rank in runs:
        for weights in rank["manual twice"]:
            _close(weights, _plain(epochs=1))
            _close(weights, rank["manual once"])


def test_unused_parameters_are_found_or_allowed_or_told(runs: Any) -> None:
    for rank in runs:
        used = [0, 1, 2, 3]
        _close([rank["unused found"][i] for i in used], _plain())
        _close([rank["unused static"][i] for i in used], _plain(batches_per_step=2))
        untouched = _weights(Net(unused=True))[4:]
        assert all(torch.equal(a, b) for a, b in zip(rank["unused found"][4:], untouched, strict=True))
        for case in ("unused", "unused in the only step", "unused later"):
            assert "does not depend on these parameters: branch.weight, branch.bias. DDP" in rank[case]
            assert "find_unused_parameters=True" in rank[case]
        _close([rank["alternating"][i] for i in used], _plain(batches_per_step=2))


def test_20_steps_in_32_bits_equal_one_process(runs: Any) -> None:
    for rank in runs:
        for factor in (1, 3):  # 21 steps, or 9 of which every third is short
            expected = torch.cat([w.flatten() for w in _plain(3, factor, Single())])
            for name in ("speedkit_ddp", "speedkit_ddp_static"):
                found = torch.cat([w.flatten() for w in rank[f"single {name} {factor}"]])
                assert torch.linalg.norm(found - expected) <= 1e-6 * torch.linalg.norm(expected)


def test_a_measured_bucket_size_changes_no_weight(runs: Any) -> None:
    for rank in runs:
        _close(rank["auto"], _plain(batches_per_step=2))


def test_sync_batchnorm_works_on_the_cpu(runs: Any) -> None:
    expected = Normed()
    _plain(model=expected)
    for rank in runs:
        assert rank["norm classes"][1] == "_BatchNormXd"  # what Lightning leaves after a fit
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(rank["norm"][name], value, rtol=1e-9, atol=1e-12, msg=name)


def test_the_fp16_hook_is_called_on_gloo(runs: Any) -> None:
    for rank in runs:
        assert rank["fp16 calls"] == 8 + 9  # once per step, and once for the static graph
        for name in ("fp16", "fp16 static"):
            _close(rank[name], _plain(batches_per_step=2), rtol=1e-2, atol=1e-2)
            assert not torch.allclose(rank[name][0], _plain(batches_per_step=2)[0], rtol=1e-9, atol=1e-9)
    for mine, other in zip(runs[0]["fp16"], runs[1]["fp16"], strict=True):
        assert torch.equal(mine, other)


def test_a_hook_that_raises_ends_the_fit(runs: Any) -> None:
    for rank in runs:
        assert "on purpose" in rank["failing"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"static_graph": True, "find_unused_parameters": True}, "Set one of them"),
        ({"comm_hook": "fp8"}, "comm_hook='fp8' is unknown; use 'fp16', 'bf16', 'powersgd' or None"),
        ({"timeout_seconds": 0}, "timeout_seconds=0 must be from 0.001 to 1e9"),
        ({"timeout_seconds": 1e-9}, "timeout_seconds=1e-09 must be from"),
        ({"timeout_seconds": float("nan")}, "timeout_seconds=nan must be from"),
        ({"timeout_seconds": float("inf")}, "timeout_seconds=inf must be from"),
        ({"timeout_seconds": 10**400}, "timeout_seconds=10+ must be from"),
        ({"bucket_cap_mb": -1}, "bucket_cap_mb=-1 must be more than 0 and at most 1e9, or None"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb=0 must be more than 0"),
        ({"bucket_cap_mb": float("nan")}, "bucket_cap_mb=nan must be more than 0"),
        ({"bucket_cap_mb": float("inf")}, "bucket_cap_mb=inf must be more than 0"),
        ({"powersgd_rank": 0}, "powersgd_rank=0 must be at least 1"),
        ({"powersgd_start_step": -1}, "powersgd_start_step=-1 must be at least 0"),
        ({"bucket_cap_mb": "AUTO"}, "bucket_cap_mb='AUTO' must be a number, 'auto' or None"),
        ({"start_method": "thread"}, "start_method='thread' is unknown"),
    ],
)
def test_arguments_that_make_no_sense(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeedkitDDPStrategy(**arguments)


@pytest.mark.parametrize("value", ["60", "yes", None, 1, [25], torch.tensor(1.0)], ids=str)
@pytest.mark.parametrize("name", ["static_graph", "find_unused_parameters", "gradient_as_bucket_view"])
def test_a_switch_that_is_no_switch(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"{name}=.* must be True or False"):
        SpeedkitDDPStrategy(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("timeout_seconds", "60"), *((n, v) for n in ("timeout_seconds", "bucket_cap_mb") for v in (True, [25], {}))],
    ids=str,
)
def test_a_number_that_is_no_number(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"{name}=.* must be a number"):
        SpeedkitDDPStrategy(**{name: value})


@pytest.mark.parametrize("seconds", [0.001, 60, np.int64(60), np.float32(60), 1e9], ids=str)
def test_any_number_of_seconds_reaches_torch(seconds: Any) -> None:
    assert SpeedkitDDPStrategy(timeout_seconds=seconds)._timeout == timedelta(seconds=float(seconds))

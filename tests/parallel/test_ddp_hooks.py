"""The hooks on two gloo processes: what is really sent, and how far the weights are from exact ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_speedkit.parallel import SpeedkitDDPStrategy, register_comm_hook
from lightning_speedkit.parallel.power_sgd import PowerSGD
from tests.two_ranks import on_two_ranks

BATCHES, ROWS = 20, 8  # per rank
# how far the weights may be from those of one process after 20 steps, relative to how far they went
TOLERANCES = {"fp16": 1e-3, "bf16": 1e-2, "powersgd": 0.5}


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _data() -> tuple[Tensor, Tensor]:
    x = torch.randn(2 * BATCHES * ROWS, 64, generator=torch.Generator().manual_seed(2))
    return x, torch.tanh(x[:, :8] + x[:, 8:16])


def _weights(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def _trainer(strategy: Any) -> Trainer:
    return Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
    )


@contextmanager
def _counted(sends: list[tuple[int, Any]]) -> Generator[None, None, None]:
    plain: Callable[..., Any] = torch.distributed.all_reduce

    @functools.wraps(plain)
    def counted(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        sends.append((tensor.numel() * tensor.element_size(), tensor.dtype))
        return plain(tensor, *arguments, **options)

    torch.distributed.all_reduce = counted
    try:
        yield
    finally:
        torch.distributed.all_reduce = plain


def _fit(strategy: Any, fits: int = 1) -> tuple[Tensor, list[tuple[int, Any]], Trainer]:
    run, model, sends, (x, y) = _trainer(strategy), Net(), [], _data()
    rank: int = run.global_rank
    loader = DataLoader(TensorDataset(x[rank::2], y[rank::2]), batch_size=ROWS)
    for _ in range(fits):
        run.fit_loop.epoch_progress.reset()
        with _counted(sends):
            run.fit(model, loader)
    return _weights(model), sends, run


def _runs() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("fp16", "bf16"):
        weights, sends, _ = _fit(f"speedkit_ddp_{name}")
        found[name] = (weights, [bytes_ for bytes_, kind in sends if kind in (torch.float16, torch.bfloat16)])
    power = functools.partial(SpeedkitDDPStrategy, comm_hook="powersgd")
    weights, sends, _ = _fit(power(powersgd_start_step=3))
    found["powersgd"] = (weights, [bytes_ for bytes_, kind in sends if kind == torch.float32])  # not Lightning's own
    found["powersgd whole"] = _fit("speedkit_ddp_powersgd")[0]  # 20 steps are below the 100 that it sends whole
    weights, sends, run = _fit(power(powersgd_start_step=3, bucket_cap_mb=0.01), fits=2)
    found["powersgd twice"] = (weights, [bytes_ for bytes_, _ in sends], run.strategy._power_sgd.steps)
    _, _, other = _fit(power(powersgd_start_step=3))
    found["powersgd own"] = other.strategy._power_sgd is not run.strategy._power_sgd
    return found


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    return on_two_ranks(_runs, timeout=60)


@functools.cache
def _plain() -> Tensor:
    """One process on the rows of both ranks."""
    model, (x, y) = Net(), _data()
    optimizer: Any = model.configure_optimizers()
    for start in range(0, len(x), 2 * ROWS):
        optimizer.zero_grad()
        nn.functional.mse_loss(model.net(x[start : start + 2 * ROWS]), y[start : start + 2 * ROWS]).backward()
        optimizer.step()
    return _weights(model)


def _off(weights: Tensor) -> float:
    """How far from the weights of one process, relative to how far those went."""
    return float(torch.linalg.norm(weights - _plain()) / torch.linalg.norm(_plain() - _weights(Net())))


@pytest.mark.parametrize("name", TOLERANCES)
def test_the_weights_are_close_to_exact_ones_and_the_same_on_both_ranks(runs: Any, name: str) -> None:
    for rank in runs:
        assert 1e-7 < _off(rank[name][0]) < TOLERANCES[name]
    assert torch.equal(runs[0][name][0], runs[1][name][0])


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_16_bits_are_half_of_the_bytes(runs: Any, name: str) -> None:
    gradients = 4 * _plain().numel()
    for rank in runs:
        assert sum(rank[name][1]) <= 0.51 * BATCHES * gradients
        assert sum(rank[name][1]) >= 0.5 * BATCHES * gradients  # each step sends all of them


def test_powersgd_sends_thin_matrices_after_its_start(runs: Any) -> None:
    layers, biases = ((64, 64), (64, 64), (8, 64)), 64 + 64 + 8
    thin = 4 * (biases + 2 * sum(rows + columns for rows, columns in layers))
    for rank in runs:
        sent = rank["powersgd"][1]
        assert sum(sent) == 3 * 4 * _plain().numel() + 17 * thin


def test_powersgd_before_its_start_is_exact(runs: Any) -> None:
    for rank in runs:
        assert _off(rank["powersgd whole"]) < 1e-5


def test_powersgd_goes_on_in_a_second_fit_with_several_buckets(runs: Any) -> None:
    for rank in runs:
        weights, sent, steps = rank["powersgd twice"]
        assert steps == 2 * BATCHES
        assert weights.isfinite().all()
        assert sent.count(4 * _plain().numel()) <= 2  # torch makes the buckets smaller after the first step
        assert rank["powersgd own"]
    assert torch.equal(runs[0]["powersgd twice"][0], runs[1]["powersgd twice"][0])


class _Wrapped:
    """Stands for a wrapped model on a backend that cannot add up 16 bits."""

    process_group = None

    def parameters(self) -> Any:
        return iter([torch.ones(1)])

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        raise AssertionError("it must not come to this")


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_what_the_backend_cannot_is_told_with_the_way_out(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("Invalid scalar type")

    model: Any = _Wrapped()
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: "mpi")
    monkeypatch.setattr(torch.distributed, "all_reduce", refuse)
    with pytest.raises(MisconfigurationException, match=rf"comm_hook='{name}'.*'mpi' backend.*Use another hook"):
        register_comm_hook(model, name)


def test_names_that_are_none() -> None:
    model: Any = _Wrapped()
    with pytest.raises(ValueError, match=r"comm_hook='FP16' is unknown; use .* Did you mean 'fp16'"):
        register_comm_hook(model, "FP16")
    with pytest.raises(ValueError, match="power_sgd has no effect with comm_hook='fp16'"):
        register_comm_hook(model, "fp16", PowerSGD())
    with pytest.raises(ValueError, match="Did you mean 'powersgd'"):
        SpeedkitDDPStrategy(comm_hook="power_sgd")  # type: ignore[arg-type]

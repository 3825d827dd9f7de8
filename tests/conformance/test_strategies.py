"""Every strategy name trains on two processes to the weights of one process on the whole batch."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.conformance.cases import STRATEGIES
from tests.conformance.models import quiet_trainer
from tests.two_ranks import on_two_ranks

_ROUNDS = {"speedkit_ddp_fp16": 1e-3, "speedkit_ddp_bf16": 1e-2}  # what 16 bits keep of a gradient


class _Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(16, 3, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True)


def _train(strategy: str) -> list[Tensor]:
    model = _Regression()
    loader = DataLoader(TensorDataset(*_data()), batch_size=2, shuffle=False)
    trainer = quiet_trainer([], strategy=strategy, devices=2, max_epochs=3, use_distributed_sampler=True)
    trainer.fit(model, loader)
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("name", STRATEGIES)
def test_two_ranks_equal_a_plain_loop(name: str) -> None:
    # Lightning always shuffles training data under DDP, with the seed and epoch of torch's DistributedSampler.
    # the stages of a pipeline, and ranks that share layers, see the same batches
    replicas = 1 if name in ("speedkit_pipeline", "speedkit_tensor_parallel_2") else 2
    model, (x, y) = _Regression(), _data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        order = torch.randperm(16, generator=torch.Generator().manual_seed(epoch))
        for step in range(8 // replicas):
            rows = torch.cat([order[rank::replicas][2 * step : 2 * step + 2] for rank in range(replicas)])
            optimizer.zero_grad()
            nn.functional.mse_loss(model.net(x[rows]), y[rows]).backward()
            optimizer.step()
    for weights in on_two_ranks(_train, name):
        tolerance = _ROUNDS.get(name, 1e-9)
        torch.testing.assert_close(
            weights, [p.detach() for p in model.parameters()], rtol=tolerance, atol=tolerance / 10
        )

"""A BatchNorm that exchanges statistics is found, whichever it is, and refused where ranks could not keep in step."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn, randn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from lightning_speedkit import ActivationCheckpointing, AutoMicroBatch, BatchSizeSearch
from lightning_speedkit.measure.sync_batch_norm import holds_sync_batch_norm
from lightning_speedkit.parallel.host_batch_norm import HostSyncBatchNorm
from tests.two_ranks import on_two_ranks

CALLBACKS: dict[str, Any] = {
    "checkpointing": lambda: ActivationCheckpointing(["net.0"]),
    "budget": lambda: ActivationCheckpointing(["net.0"], budget=0.9),
    "micro batches": AutoMicroBatch,
    "batch size": BatchSizeSearch,
}


@pytest.mark.parametrize(
    ("layer", "found"),
    [(nn.SyncBatchNorm(2), True), (HostSyncBatchNorm(2), True), (nn.BatchNorm1d(2), False), (nn.Linear(2, 2), False)],
    ids=["torch's", "on the host", "of one rank", "none"],
)
def test_it_is_found_at_any_depth(layer: nn.Module, found: bool) -> None:
    assert holds_sync_batch_norm(layer) is found
    assert holds_sync_batch_norm(nn.ModuleDict({"a": nn.Sequential(nn.ReLU(), layer)})) is found


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 4
        self.net = nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), nn.Linear(4, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(randn(16, 3)), batch_size=self.batch_size)

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1)


def _refused(case: str) -> str:
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="speedkit_ddp",
        sync_batchnorm=True,
        max_epochs=1,
        enable_model_summary=False,
        callbacks=[CALLBACKS[case]()],
        **quiet,
    )
    try:
        trainer.fit(Net())
    except (MisconfigurationException, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("case", CALLBACKS)
def test_on_cpus_too_ranks_do_not_lose_step(case: str) -> None:
    for told in on_two_ranks(_refused, case):
        assert "SyncBatchNorm" in told

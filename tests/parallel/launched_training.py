"""A training that several processes run together, and in which one of them sends a signal at a known batch.

It runs as a script, under torchrun or with Lightning's own launcher, and as a function in forked processes. In
``folder`` each rank leaves its process id, and rank 0 the final weights, once a run has come to its end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_speedkit.data import SpeedkitDataModule
from lightning_speedkit.parallel import SpeedkitDDPStrategy
from lightning_speedkit.parallel.launch_check import check_launch
from lightning_speedkit.parallel.resume import newest_checkpoint
from lightning_speedkit.parallel.spot_interruption import SpotInterruption

SAMPLES, EPOCHS, ACCUMULATE = 96, 3, 3  # 12 batches of 4 on each of 2 ranks: 4 steps an epoch


class Data(SpeedkitDataModule):
    def __init__(self) -> None:
        super().__init__(batch_size=4, num_workers=0, shuffle=True, seed=3)

    def dataset(self, split: str) -> Any:
        if split != "train":
            return None
        numbers = torch.Generator().manual_seed(1)
        inputs = torch.randn(SAMPLES, 5, generator=numbers, dtype=torch.float64)
        return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


class Net(LightningModule):
    """Dropout needs the random state, momentum the optimizer's, and the rate the scheduler's."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 1)).double()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Sender(Callback):
    """Sends a signal once: ``"SIGTERM", "1", 2, 4`` from rank 1 to itself in epoch 2 at batch 4; ``"parent"`` to the
    process that started rank 0, and all ranks wait until it has come to them."""

    def __init__(self, folder: Path, name: str, to: str, epoch: int, batch: int) -> None:
        self.folder, self.name, self.to, self.at = folder, name, to, (epoch, batch)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) != self.at:
            return
        rank, sent = trainer.global_rank, self.folder / f"sent{trainer.global_rank}"
        if sent.exists():
            return
        sent.touch()
        number = getattr(signal, self.name)
        if self.to == "parent":
            if rank == 0:
                os.kill(os.getppid(), number)
            spot = next((one for one in trainer.callbacks if isinstance(one, SpotInterruption)), None)
            end = time.monotonic() + 30
            while spot is not None and spot._note is not None and not spot._note.number and time.monotonic() < end:
                time.sleep(0.01)
        elif int(self.to) == rank:
            os.kill(os.getpid(), number)


def train(folder: str, send: list[Any] | None, options: dict[str, Any]) -> dict[str, Any]:
    """One start of the run; goes on where the one before has ended."""
    where = Path(folder)
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and os.environ["RANK"] == "1":
        time.sleep(options.get("late", 0.0))
    launch = check_launch()
    seed_everything(7, verbose=False)
    callbacks: list[Callback] = [ModelCheckpoint(where, "saved", every_n_train_steps=2, enable_version_counter=False)]
    if options.get("spot", True):
        callbacks.insert(0, SpotInterruption(where, exit_code=options.get("exit_code", 0)))
    if send is not None:
        callbacks.append(Sender(where, *send))
    trainer = Trainer(
        strategy=SpeedkitDDPStrategy(process_group_backend="gloo", timeout_seconds=50),
        accelerator="cpu",
        devices=launch.devices or options.get("devices", 2),
        num_nodes=launch.num_nodes or 1,
        max_epochs=EPOCHS,
        accumulate_grad_batches=options.get("accumulate", ACCUMULATE),
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    (where / f"pid{trainer.global_rank}").write_text(str(os.getpid()))
    model = Net()
    trainer.fit(model, Data(), ckpt_path=newest_checkpoint(where))
    if trainer.is_global_zero:
        torch.save(model.state_dict(), where / "part.pt")
        (where / "part.pt").replace(where / "weights.pt")
    return {"rank": trainer.global_rank, "world": trainer.world_size, "starter": launch.starter}


if __name__ == "__main__":
    train(sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]))

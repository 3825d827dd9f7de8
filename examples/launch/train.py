"""One script for every way to start it: by itself, torchrun, SLURM's srun, and variables as Kubernetes sets them.

    python train.py                                     # Lightning starts a second process
    torchrun --nproc-per-node 2 --max-restarts 3 train.py
    sbatch slurm.sbatch
    kubectl apply -f kubernetes.yaml

Told to stop (SIGTERM), it saves and ends. Started again, it goes on in the middle of the epoch, with the same weights
as a run that was never stopped.
"""

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import TensorDataset

from lightning_speedkit import (
    SpeedkitDataModule,
    SpeedkitDDPStrategy,
    SpotInterruption,
    check_launch,
    newest_checkpoint,
)
from lightning_speedkit.demo.digits import load_digits, split_indices


class Digits(SpeedkitDataModule):
    def dataset(self, split):
        if split != "train":
            return None
        images, labels = (torch.from_numpy(array[split_indices(split)]) for array in load_digits())
        return TensorDataset(images.float().flatten(1) / 16, labels.long())


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="checkpoints", help="a folder that all machines see")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--exit-code", type=int, default=0, help="after an interruption")
    arguments = parser.parse_args()
    launch = check_launch()  # before anything waits for the others
    seed_everything(0, verbose=False)
    trainer = Trainer(
        strategy=SpeedkitDDPStrategy(timeout_seconds=120),
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=launch.devices or 2,
        num_nodes=launch.num_nodes or 1,
        max_epochs=arguments.epochs,
        accumulate_grad_batches=2,
        callbacks=[
            ModelCheckpoint(arguments.folder, filename="step", every_n_train_steps=20, enable_version_counter=False),
            SpotInterruption(arguments.folder, signals=["SIGTERM", "SIGUSR1"], exit_code=arguments.exit_code),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), Digits(batch_size=16, num_workers=1), ckpt_path=newest_checkpoint(arguments.folder))
    if trainer.is_global_zero:
        print(f"{trainer.global_step} steps, {trainer.world_size} ranks, started by {launch.starter}")


if __name__ == "__main__":
    main()

"""The demo's model is an ordinary LightningModule that learns the digits."""

from __future__ import annotations

from pathlib import Path

import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_speedkit.demo.digits import DigitFiles, write_image_folder
from lightning_speedkit.demo.model import DigitNet


def test_it_has_the_parameters_that_its_layers_add_up_to() -> None:
    convolutions = 16 * 32 + 9 * (32 * 64 + 64 * 128 + 128 * 128)
    norms = 2 * (32 + 64 + 128 + 128)
    linear = 128 * 10 + 10
    assert sum(p.numel() for p in DigitNet().parameters()) == convolutions + norms + linear == 242_122


def test_training_with_a_trainer_equals_a_plain_loop(tmp_path: Path) -> None:
    write_image_folder(tmp_path, size=32, limit=32)
    data = DigitFiles(tmp_path / "train")

    def loader() -> DataLoader[tuple[torch.Tensor, int]]:
        return DataLoader(data, batch_size=8)

    torch.manual_seed(1)
    plain = DigitNet()
    torch.manual_seed(1)
    trained = DigitNet()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    plain.train()
    for images, labels in loader():
        optimizer.zero_grad()
        torch.nn.CrossEntropyLoss()(plain.layers(images), labels).backward()
        optimizer.step()
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(trained, loader())
    for name, value in plain.state_dict().items():
        assert torch.equal(trained.state_dict()[name], value), name


def test_the_logged_accuracy_is_the_share_of_right_answers_over_the_whole_split(tmp_path: Path) -> None:
    write_image_folder(tmp_path, size=32, limit=10)
    data = DigitFiles(tmp_path / "test")
    torch.manual_seed(3)
    model = DigitNet()
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
    (quality,) = trainer.test(model, DataLoader(data, batch_size=4), verbose=False)  # 4, 4 and 2 images
    model.eval()
    with torch.no_grad():
        right = sum(int(model(image.unsqueeze(0)).argmax()) == label for image, label in data)
    assert abs(quality["test_acc"] - right / 10) < 1e-6

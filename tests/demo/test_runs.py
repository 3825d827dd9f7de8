"""The trainings that the demo compares differ in nothing but what they say."""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_speedkit.data import verify_lmdb
from lightning_speedkit.demo.digits import DigitFiles, decoded_samples, to_network_input, write_image_folder
from lightning_speedkit.demo.runs import (
    DigitsDataModule,
    TrainingSettings,
    bundle_for,
    new_model,
    pack,
    train_from_files,
    train_from_store,
)
from lightning_speedkit.facts import Hardware

SETTINGS = TrainingSettings(seed=5, epochs=2, batch_size=8)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("demo")
    write_image_folder(folder, size=32, limit=44)  # batches of 8: the last one is smaller
    return str(folder)


def _store(images: str, root: Path) -> DigitsDataModule:
    return DigitsDataModule(str(root), images, SETTINGS.batch_size, SETTINGS.seed)


def test_files_workers_and_store_end_with_the_weights_of_a_plain_loop(images: str, tmp_path: Path) -> None:
    data = [DigitFiles(Path(images, "train"))[i] for i in range(44)]
    model = new_model(SETTINGS.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(2):
        order = torch.randperm(44, generator=torch.Generator().manual_seed(SETTINGS.seed + epoch)).tolist()
        for start in range(0, 44, 8):
            batch = [data[i] for i in order[start : start + 8]]
            scores = model(torch.stack([image for image, _ in batch]))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(scores, torch.tensor([label for _, label in batch])).backward()
            optimizer.step()
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        digest.update(name.encode() + value.numpy().tobytes())
    model.eval()
    tests = [DigitFiles(Path(images, "test"))[i] for i in range(44)]
    with torch.no_grad():
        right = sum(int(model(image.unsqueeze(0)).argmax()) == label for image, label in tests)

    before = torch.get_rng_state()
    results = [
        train_from_files(new_model(SETTINGS.seed), images, SETTINGS),
        train_from_files(new_model(SETTINGS.seed), images, SETTINGS, num_workers=2),
        train_from_store(new_model(SETTINGS.seed), _store(images, tmp_path), SETTINGS),
        train_from_store(new_model(SETTINGS.seed), _store(images, tmp_path), SETTINGS, presets=("fp32",)),
    ]
    assert torch.equal(torch.get_rng_state(), before)
    assert [result.weights_digest for result in results] == [digest.hexdigest()] * 4
    assert [result.test_accuracy for result in results] == [pytest.approx(right / 44, abs=1e-6)] * 4
    assert [result.name for result in results] == ["files", "files, 2 workers", "LMDB", "LMDB, preset fp32"]
    for result in results:
        assert result.precision == "32-true"
        assert result.timing.steps == 2 * (6 - 3)  # three of six steps of an epoch warm up
        assert result.timing.samples == 2 * (8 + 8 + 4)
        assert 0 < result.timing.seconds_data + result.timing.seconds_compute <= result.timing.seconds_wall


def test_the_bundle_trains_as_well_in_its_own_precision(images: str, tmp_path: Path) -> None:
    result = train_from_store(new_model(1), _store(images, tmp_path), SETTINGS, presets=("cpu",))
    assert result.precision in ("bf16-mixed", "32-true")
    assert result.name == "LMDB, preset cpu"
    assert result.timing.steps == 6


def test_the_store_holds_the_decoded_files_in_little_more_than_their_bytes(tmp_path: Path) -> None:
    images = tmp_path / "images"
    write_image_folder(images)
    data = DigitsDataModule(str(tmp_path / "stores"), str(images))
    assert pack(data) > 0
    payload = size = 0
    for split, count in (("train", 1197), ("val", 200), ("test", 400)):
        report = verify_lmdb(data.path(split))
        assert report.samples == count
        payload += count * (64 * 64 + 8)
        size += data.path(split).stat().st_size
    assert size <= 1.05 * payload
    stored = data.dataset("val")
    assert stored is not None
    for (pixels, label), sample in zip(decoded_samples(images / "val"), stored, strict=False):
        assert torch.equal(sample[0], pixels)
        assert sample[1] == label


def test_a_batch_of_the_store_is_that_of_the_files(images: str, tmp_path: Path) -> None:
    data = _store(images, tmp_path)
    pack(data)
    stored, labels = data.on_after_batch_transfer(next(iter(data.val_dataloader())), 0)
    read, same_labels = next(iter(DataLoader(DigitFiles(Path(images, "val")), batch_size=8)))
    assert torch.equal(stored, read)
    assert torch.equal(labels, same_labels)
    assert torch.equal(stored[0], to_network_input(next(decoded_samples(Path(images, "val")))[0]))
    assert data.samples("predict") is None


@pytest.mark.parametrize(
    ("accelerator", "count", "bundle"),
    [
        ("cpu", 1, "cpu"),
        ("cuda", 1, "single-gpu"),
        ("cuda", 8, "single-gpu"),
        ("mps", 1, "single-gpu"),
        ("xpu", 1, "cpu"),
    ],
)
def test_the_bundle_follows_the_machine(accelerator: str, count: int, bundle: str) -> None:
    assert bundle_for(Hardware(accelerator=accelerator, device_name="a device", device_count=count)) == bundle


def _pressed_after(steps: int) -> Callable[[], None]:
    seen = 0

    def tick() -> None:
        nonlocal seen
        seen += 1
        if seen == steps:
            raise KeyboardInterrupt

    return tick


def test_ctrl_c_arrives_as_such_and_can_be_pressed_again(images: str) -> None:
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train_from_files(new_model(1), images, SETTINGS, tick=_pressed_after(2))
    assert signal.getsignal(signal.SIGINT) is handler


def test_the_first_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(0)
    first = new_model(7)
    torch.manual_seed(1)
    again, other = new_model(7), new_model(8)
    for name, value in first.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
    assert not torch.equal(other.layers[0][0].weight, first.layers[0][0].weight)

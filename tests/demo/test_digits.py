"""The digits are those of the data set, and their image files are what people have."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image
from sklearn import datasets

from lightning_speedkit.demo.digits import (
    SPLITS,
    DigitFiles,
    decoded_samples,
    disk_use,
    load_digits,
    payload_bytes,
    render_digit,
    split_indices,
    to_network_input,
    write_image_folder,
)


def test_the_digits_are_those_of_the_data_set() -> None:
    reference = datasets.load_digits()
    images, labels = load_digits()
    assert images.dtype == numpy.uint8
    assert labels.dtype == numpy.uint8
    assert numpy.array_equal(images, reference.images)
    assert numpy.array_equal(labels, reference.target)


def test_the_splits_are_a_partition_in_which_every_digit_occurs() -> None:
    _, labels = load_digits()
    parts = [split_indices(split) for split in SPLITS]
    assert [len(part) for part in parts] == [1197, 200, 400]
    assert sorted(index for part in parts for index in part) == list(range(1797))
    assert all(set(labels[part]) == set(range(10)) for part in parts)
    with pytest.raises(ValueError, match="no split 'tset'; use one of train, val, test"):
        split_indices("tset")


@pytest.mark.parametrize("size", [8, 64])
def test_a_rendered_digit_keeps_the_shape_of_its_source(size: int) -> None:
    images, _ = load_digits()
    for index in (0, 500, 1796):
        image = render_digit(images[index], size)
        assert (image.mode, image.size) == ("L", (size, size))
        # averaging each 8x8 cell undoes a smooth enlargement, but for the blur across the edges of a cell
        back = numpy.asarray(image, dtype=float).reshape(8, size // 8, 8, size // 8).mean(axis=(1, 3)) * 16 / 255
        assert numpy.corrcoef(back.ravel(), images[index].ravel())[0, 1] > 0.97
        if size == 8:
            assert numpy.array_equal(back.round(), images[index])


def test_the_folder_has_one_png_per_digit_under_its_label(tmp_path: Path) -> None:
    ticks: list[int] = []
    written = write_image_folder(tmp_path / "images", size=16, limit=20, advance=lambda: ticks.append(1))
    images, labels = load_digits()
    assert written == len(ticks) == 60
    for split in SPLITS:
        wanted = {tmp_path / "images" / split / str(labels[i]) / f"{i:04d}.png" for i in split_indices(split)[:20]}
        found = {path for path in (tmp_path / "images" / split).rglob("*") if path.is_file()}
        assert found == wanted
    index = split_indices("test")[3]
    with Image.open(tmp_path / f"images/test/{labels[index]}/{index:04d}.png") as image:
        assert image.format == "PNG"
        assert numpy.array_equal(numpy.asarray(image), numpy.asarray(render_digit(images[index], 16)))


def test_files_give_the_floats_of_the_decoded_pixels_bit_for_bit(tmp_path: Path) -> None:
    write_image_folder(tmp_path, limit=30)
    dataset = DigitFiles(tmp_path / "train")
    decoded = list(decoded_samples(tmp_path / "train"))
    assert len(dataset) == len(decoded) == 30
    as_batch = to_network_input(torch.stack([pixels for pixels, _ in decoded]))
    for index, (pixels, label) in enumerate(decoded):
        image, same_label = dataset[index]
        assert (pixels.dtype, tuple(pixels.shape)) == (torch.uint8, (1, 64, 64))
        assert same_label == label
        assert torch.equal(image, as_batch[index])


def test_the_train_images_are_normalized(tmp_path: Path) -> None:
    write_image_folder(tmp_path)
    images = torch.stack([image for image, _ in DigitFiles(tmp_path / "train")])
    assert abs(images.mean().item()) < 2e-3
    assert abs(images.std().item() - 1) < 2e-3


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no images"):
        DigitFiles(tmp_path)


def test_bytes_are_counted_as_written(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one").write_bytes(b"x" * 10)
    (tmp_path / "two").write_bytes(b"y" * 5000)
    use = disk_use(tmp_path)
    assert (use.files, use.apparent_bytes) == (2, 5010)
    blocks = sum(path.stat().st_blocks for path in (tmp_path, *tmp_path.rglob("*")))
    assert use.allocated_bytes == 512 * blocks
    alone = disk_use(tmp_path / "two")
    assert (alone.files, alone.apparent_bytes) == (1, 5000)


def test_the_payload_is_pixels_and_labels(tmp_path: Path) -> None:
    write_image_folder(tmp_path, size=16, limit=7)
    assert payload_bytes(tmp_path / "val") == 7 * (16 * 16 + 8)

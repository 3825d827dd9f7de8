"""Crops against their definition, and the resizing against a filter written out in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_speedkit.data.images.image_geometry import (
    Box,
    Pixels,
    center_box,
    dct_reduction,
    random_box,
    reduced_box,
    resize_into,
)
from tests.data.pictures import photographs

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


def weights(source: int, target: int) -> np.ndarray:
    """The triangle filter as a matrix (target, source): as wide as the picture shrinks, edges left out."""
    factor = source / target
    width = max(factor, 1.0)
    centers = (np.arange(target) + 0.5) * factor
    triangle = np.maximum(0, 1 - np.abs((np.arange(source) + 0.5)[None] - centers[:, None]) / width)
    return triangle / triangle.sum(1, keepdims=True)


def resized(picture: Pixels, height: int, width: int) -> np.ndarray:
    rows = np.einsum("ts,swc->twc", weights(picture.shape[0], height), picture.astype(np.float64))
    return np.einsum("ts,hsc->htc", weights(picture.shape[1], width), rows)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((427, 640), (224, 224)),
        ((427, 640), (37, 201)),
        ((427, 640), (500, 30)),
        ((427, 640), (427, 100)),
        ((60, 50), (224, 224)),
        ((3, 400), (24, 24)),
        ((400, 2), (24, 24)),
        ((1, 1), (24, 24)),
        ((1, 300), (24, 24)),
        ((300, 1), (24, 24)),
        ((300, 200), (1, 1)),
        ((300, 200), (40, 1)),  # of one column, torch's own uint8 kernel computes something else
        ((300, 200), (1, 40)),
        ((2, 2), (3, 3)),
    ],
)
def test_the_filter_is_a_triangle(source: tuple[int, int], target: tuple[int, int], channels: int) -> None:
    for photograph in photographs():
        picture = np.ascontiguousarray(photograph[-source[0] :, -source[1] :, :channels])
        out = np.zeros((*target, channels), np.uint8)
        resize_into(picture, out)
        assert np.abs(out - resized(picture, *target)).max() <= 1.01  # the rounding of two passes


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_a_part_of_a_picture_into_a_row_of_a_batch(data: st.DataObject) -> None:
    side = st.integers(1, 70)
    height, width, rows, columns = (data.draw(side) for _ in range(4))
    top, left = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 5))
    channels = data.draw(st.sampled_from([1, 3]))
    photograph = photographs()[0][100 : 100 + height + 9, 200 : 200 + width + 9, :channels].copy()
    part = photograph[top : top + height, left : left + width]
    batch = np.full((3, rows, columns, channels), 77, np.uint8)
    resize_into(part, batch[1])
    assert np.abs(batch[1] - resized(part.copy(), rows, columns)).max() <= 1.01
    assert (batch[0] == 77).all()
    assert (batch[2] == 77).all()


def test_the_same_size_is_a_copy() -> None:
    picture = photographs()[0]
    out = np.empty_like(picture)
    resize_into(picture, out)
    assert np.array_equal(out, picture)


@pytest.mark.parametrize(
    ("height", "width", "size", "expected"),
    [
        (400, 600, (224, 224), Box(0, 100, 400, 400)),
        (600, 400, (224, 224), Box(100, 0, 400, 400)),
        (400, 600, (100, 300), Box(100, 0, 200, 600)),
        (400, 600, (300, 100), Box(0, 233, 400, 133)),
        (1, 1, (224, 224), Box(0, 0, 1, 1)),
        (1, 5000, (10, 20), Box(0, 2499, 1, 2)),
        (5000, 1, (10, 2000), Box(2499, 0, 1, 1)),
        (7, 7, (3, 3), Box(0, 0, 7, 7)),
    ],
)
def test_center_boxes_worked_out_by_hand(height: int, width: int, size: tuple[int, int], expected: Box) -> None:
    assert center_box(height, width, size) == expected


def test_random_boxes_are_what_was_asked_for() -> None:
    rng = np.random.default_rng(1)
    boxes = np.array([random_box(1000, 1500, SCALE, RATIO, rng) for _ in range(4000)])
    top, left, height, width = boxes.T
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + height <= 1000).all()
    assert (left + width <= 1500).all()
    share, ratio = height * width / 1.5e6, width / height
    assert 0.079 < share.min() < 0.085
    assert 0.74 < ratio.min() < 0.76
    assert 1.32 < ratio.max() < 1.345
    # up to a share of 0.5 every shape fits, so that nothing was drawn again: uniform, and so is the logarithm
    small = share < 0.5
    assert np.quantile(share[small], [0.25, 0.5, 0.75]) == pytest.approx([0.185, 0.29, 0.395], abs=0.02)
    assert np.quantile(np.log(ratio[small]), [0.25, 0.5, 0.75]) == pytest.approx(
        np.log(4 / 3) * np.array([-0.5, 0, 0.5]), abs=0.02
    )
    # and so is the place, of all that the box leaves free
    assert np.quantile(top / (1000 - height + 1e-9), [0.25, 0.5, 0.75]) == pytest.approx([0.25, 0.5, 0.75], abs=0.03)
    assert np.quantile(left / (1500 - width + 1e-9), [0.25, 0.5, 0.75]) == pytest.approx([0.25, 0.5, 0.75], abs=0.03)


def test_every_place_of_a_small_picture_is_reached() -> None:
    rng = np.random.default_rng(0)
    boxes = {random_box(3, 3, (1 / 9, 1 / 9), (1.0, 1.0), rng) for _ in range(300)}
    assert boxes == {Box(y, x, 1, 1) for y in range(3) for x in range(3)}


@pytest.mark.parametrize(
    ("height", "width", "ratio", "expected"),
    [
        (10, 1000, RATIO, Box(0, 493, 10, 13)),  # 4 / 3 of the height
        (1000, 10, RATIO, Box(493, 0, 13, 10)),  # 3 / 4 of the height is the width
        (10, 1000, (200.0, 300.0), Box(2, 0, 5, 1000)),
        (1, 1, (200.0, 300.0), Box(0, 0, 1, 1)),
    ],
)
def test_where_nothing_fits(height: int, width: int, ratio: tuple[float, float], expected: Box) -> None:
    rng = np.random.default_rng(0)
    assert random_box(height, width, (1.0, 1.0), ratio, rng) == expected  # no other has the whole area


def test_a_generator_decides_alone() -> None:
    state = np.random.get_state()[1].copy()
    first, second, other = (random_box(300, 400, SCALE, RATIO, np.random.default_rng(seed)) for seed in (7, 7, 8))
    assert first == second != other
    assert np.array_equal(np.random.get_state()[1], state)


@pytest.mark.parametrize(
    ("height", "width", "size", "expected"),
    [
        (447, 900, (224, 224), 1),
        (448, 448, (224, 224), 2),
        (895, 5000, (224, 224), 2),
        (896, 896, (224, 224), 4),
        (1792, 1792, (224, 224), 8),
        (50_000, 50_000, (224, 224), 8),
        (1792, 1792, (224, 900), 1),
        (4000, 4000, (7, 224), 1),  # too small a target to tell the scales apart
    ],
)
def test_reductions_worked_out_by_hand(height: int, width: int, size: tuple[int, int], expected: int) -> None:
    assert dct_reduction(Box(3, 5, height, width), size) == expected


@given(st.integers(8, 40), st.integers(8, 40), st.integers(0, 300), st.integers(0, 300), st.data())
@settings(max_examples=200, deadline=None)
def test_reduced_boxes(rows: int, columns: int, more: int, wider: int, data: st.DataObject) -> None:
    reduction = data.draw(st.sampled_from([2, 4, 8]))
    height, width = rows * reduction + more, columns * reduction + wider
    box_height = data.draw(st.integers(rows * reduction, height))
    box_width = data.draw(st.integers(columns * reduction, width))
    box = Box(
        data.draw(st.integers(0, height - box_height)),
        data.draw(st.integers(0, width - box_width)),
        box_height,
        box_width,
    )
    reduced = reduced_box(box, height, width, reduction, (rows, columns))
    for start, length, first, count, whole, least in (
        (box.top, box.height, reduced.top, reduced.height, height, rows),
        (box.left, box.width, reduced.left, reduced.width, width, columns),
    ):
        assert first >= 0
        assert first + count <= math.floor(whole / reduction)  # whole pixels of the reduced picture
        assert count >= least
        assert abs(first - start / reduction) <= 1
        assert abs(first + count - (start + length) / reduction) <= 1

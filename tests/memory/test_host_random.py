"""Python's and numpy's random states: read, compared and put back."""

from __future__ import annotations

import random

import numpy
import pytest

from lightning_speedkit.memory.host_random import read_host_random, write_host_random


def _draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), numpy.random.random(), numpy.random.standard_normal()]


def test_what_is_put_back_draws_the_same_again() -> None:
    random.seed(1)
    numpy.random.seed(1)
    numpy.random.standard_normal()  # one of a pair: numpy keeps the other for the next call
    before = read_host_random()
    first = _draw()
    write_host_random(before)
    assert read_host_random() == before
    assert _draw() == first


@pytest.mark.parametrize("draw", [random.random, numpy.random.random, numpy.random.standard_normal])
def test_any_draw_changes_what_is_read(draw: object) -> None:
    before = read_host_random()
    draw()  # type: ignore[operator]
    assert read_host_random() != before


def test_reading_draws_nothing() -> None:
    random.seed(2)
    numpy.random.seed(2)
    expected = _draw()
    random.seed(2)
    numpy.random.seed(2)
    read_host_random()
    assert _draw() == expected


def test_another_bit_generator_of_numpy_is_left_alone() -> None:
    found = numpy.random.get_bit_generator()
    try:
        numpy.random.set_bit_generator(numpy.random.PCG64(3))
        state = read_host_random()
        drawn = numpy.random.random()
        write_host_random(state)
        assert numpy.random.random() != drawn  # its state was not put back, and nothing was raised
    finally:
        numpy.random.set_bit_generator(found)

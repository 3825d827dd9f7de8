"""What is told of compilations, and how they are counted."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from lightning_speedkit.precision.compile_log import CompileLog


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (["(2,)", "(3,)", "(4,)", "(5,)"], r"'net' was compiled again 4 times for inputs of shape \(2,\), then \(3,\)"),
        (["(2,)"] * 4, r"of the same shape, \(2,\): a Python value of the module changes"),
    ],
    ids=["shapes change", "they do not"],
)
def test_the_fourth_time_is_told_and_no_other(shapes: list[str], message: str) -> None:
    log = CompileLog()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for shape in shapes[:3]:
            log.again("net", shape)
    with pytest.warns(UserWarning, match=message):
        log.again("net", shapes[3])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log.again("net", "(6,)")
    assert log.recompiles == {"net": [*shapes, "(6,)"]}


def test_a_log_counts_only_between_listen_and_stop() -> None:
    handler: Any = torch._dynamo.callback.callback_handler
    log, found = CompileLog(), (list(handler.start_callbacks), list(handler.end_callbacks))
    log.listen()
    log.listen()
    assert len(handler.start_callbacks) == len(found[0]) + 1
    handler.run_start_callbacks(None)
    assert (log.started, log.seconds) == (1, 0.0)
    handler.run_end_callbacks(None)
    assert log.seconds > 0
    log.stop()
    log.stop()
    assert (list(handler.start_callbacks), list(handler.end_callbacks)) == found
    log.listen()
    handler.clear()  # as torch._dynamo.reset() does
    log.stop()
    assert log.started == 1


def test_a_module_that_gives_a_graph_later_or_in_training_is_no_failure() -> None:
    log = CompileLog()
    log.traced("a", True, 0)
    log.traced("a", True, 2)
    log.traced("b", False, 0, "no reason that matters")  # a sanity check before the training
    log.traced("b", True, 1)
    log.settle()
    assert log.failures == {}


def test_a_module_that_never_gives_one_is() -> None:
    log = CompileLog()
    with pytest.warns(UserWarning, match="'a' could not be compiled .* a limit is reached"):
        log.traced("a", True, 0, "a limit is reached")
    log.traced("b", False, 3)
    log.traced("b", True, 0)  # evaluation is compiled, training is not
    log.traced("c", False, 0, "a generator")
    assert log.failures == {"a": "a limit is reached."}
    log.settle()
    log.settle()
    assert list(log.failures) == ["a", "b", "c"]
    assert log.failures["b"].startswith("torch gave no graph of it to the backend")
    assert log.failures["c"] == "a generator."

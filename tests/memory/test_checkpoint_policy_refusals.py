"""What is refused before modules are checkpointed, each reason by itself, and what is told once."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torchmetrics import MeanMetric

from lightning_speedkit.measure.sync_batch_norm import holds_sync_batch_norm
from lightning_speedkit.memory.checkpoint_policy_refusals import (
    SYNC_BATCH_NORM,
    checked_every,
    refuse_nested,
    refuse_what_cannot_be_exchanged,
    warn_of_what_happens_twice,
)
from lightning_speedkit.memory.recomputation import recomputed_class


def _network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU())))


def _take(network: nn.Module, path: str) -> None:
    module = network.get_submodule(path)
    module.__class__ = recomputed_class(type(module))


@pytest.mark.parametrize("every", [1, 2, 1000])
def test_every_comes_back(every: int) -> None:
    assert checked_every(every) == every


@pytest.mark.parametrize(
    ("every", "error", "message"),
    [
        (0, ValueError, "every=0 must be 1"),
        (-3, ValueError, "every=-3 must be 1"),
        (True, TypeError, "a whole number, got True"),
        (1.0, TypeError, "a whole number, got 1.0"),
        ("2", TypeError, "a whole number, got '2'"),
    ],
)
def test_every_is_a_whole_number_from_1_on(every: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        checked_every(every)


@pytest.mark.parametrize(
    ("chosen", "inner", "outer"),
    [(["1", "1.1"], "1.1", "1"), (["1.1.0", "0", "1"], "1.1.0", "1"), (["1.1", "1.1.1"], "1.1.1", "1.1")],
)
def test_of_nested_modules_both_are_named(chosen: list[str], inner: str, outer: str) -> None:
    with pytest.raises(ValueError, match=f"'{inner}' lies inside '{outer}', and both") as told:
        refuse_nested(_network(), chosen)
    assert "Is checkpointed already" not in str(told.value)


@pytest.mark.parametrize(("taken", "chosen"), [("1", "1.1"), ("1.1", "1")])
def test_inside_and_around_what_is_checkpointed(taken: str, chosen: str) -> None:
    network = _network()
    _take(network, taken)
    with pytest.raises(ValueError, match=f"Is checkpointed already: '{taken}'"):
        refuse_nested(network, [chosen])


def test_beside_each_other_is_not_nested() -> None:
    network = _network()
    network.add_module("10", nn.Linear(2, 2))  # begins with the same digit
    refuse_nested(network, ["0", "1", "10"])
    _take(network, "1.1")
    _take(network, "1")  # two that were there, as by hand, are not this choice's business
    refuse_nested(network, ["0"])


def _patched() -> nn.Module:
    module = nn.Linear(2, 2)
    module.forward = lambda x: x  # type: ignore[method-assign, assignment]
    return module


@pytest.mark.parametrize(
    ("path", "module", "message"),
    [
        ("a", torch.jit.script(nn.Linear(2, 2)), "'a' is a TorchScript module"),
        ("a", nn.LazyLinear(2), "'a' is lazy"),
        ("a.b", _patched(), "'a.b' has a forward of its own"),
        ("a", checkpoint_wrapper(nn.Linear(2, 2)), "'a' is checkpointed already, by torch's"),
        ("a._checkpoint_wrapped_module", nn.Linear(2, 2), "is checkpointed already, by torch's"),
    ],
)
def test_what_cannot_be_exchanged_is_named(path: str, module: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        refuse_what_cannot_be_exchanged(path, module)


def test_around_those_it_is_allowed() -> None:
    lazy = nn.LazyLinear(2)
    for inner in (torch.jit.script(nn.Linear(2, 2)), lazy, _patched()):
        refuse_what_cannot_be_exchanged("a", nn.Sequential(inner))
    lazy(torch.ones(1, 2))
    refuse_what_cannot_be_exchanged("a", lazy)


def _told(network: nn.Module, paths: list[str]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_what_happens_twice(network, paths)
    return [str(one.message) for one in caught]


def test_nothing_is_told_of_a_plain_network() -> None:
    network = _network()
    network.add_module("mean", MeanMetric())  # outside of what is chosen
    assert _told(network, ["1"]) == []


def test_a_metric_and_the_model_s_own_checkpointing_are_told_once_each() -> None:
    network = _network()
    network[1][1].mean, network[1].another = MeanMetric(), MeanMetric()
    for inner in network[1]:
        inner.gradient_checkpointing = True
    metric, checkpointing = _told(network, ["0", "1"])
    assert metric.startswith("'1.another' is a metric") or metric.startswith("'1.1.mean' is a metric")
    assert checkpointing.startswith("'1.0' brings checkpointing of its own")


def test_a_metric_that_is_chosen_itself_is_named_without_a_dot() -> None:
    (told,) = _told(nn.Sequential(MeanMetric()), ["0"])
    assert told.startswith("'0' is a metric")


def test_sync_batch_norm_at_any_depth() -> None:
    network = _network()
    assert not holds_sync_batch_norm(network)
    network[1][1].append(nn.SyncBatchNorm(2))
    assert [holds_sync_batch_norm(part) for part in (network, network[1], network[0])] == [True, True, False]
    assert SYNC_BATCH_NORM.format(path="1.1").startswith("modules: '1.1' holds a SyncBatchNorm")

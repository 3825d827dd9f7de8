"""What is said of a leak, for things that grew here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import CatMetric

from lightning_speedkit.memory.leak_monitor_census import Grown
from lightning_speedkit.memory.leak_monitor_story import Leak, name_leak, size_text

_CPU = torch.device("cpu")


def _name(grown: list[Grown], roots: dict[str, Any], slopes: tuple[float, float] = (0.0, 0.0), known: Any = ()) -> Any:
    return name_leak(grown, roots, slopes, _CPU, [100, 124, 148], known)


def _container(container: Any) -> Grown:
    return Grown("container", id(container), "container", 1.0, 8.0)


@pytest.mark.parametrize(
    ("entries", "what", "size", "remedy"),
    [
        ([torch.zeros(5, 4)] * 9, "entries (torch.float32 [5, 4] on cpu)", 8 + 80 + 512, "keep numbers"),
        (
            [torch.ones(2, requires_grad=True).sum()] * 9,
            "entries (torch.float32 [] on cpu from SumBackward0)",
            524,
            "deta",
        ),
        (["x" * 1000] * 9, "entries (str)", 8 + 1049, "Clear it"),
        ([np.zeros(100)] * 9, "entries (numpy.ndarray float64 [100])", 8 + 912, "Clear it"),
        ([1.0, "a"] * 9, "entries", 8 + 37, "Clear it"),
    ],
)
def test_a_list_is_told_by_its_owner_and_its_entries(entries: list[Any], what: str, size: float, remedy: str) -> None:
    model = SimpleNamespace(kept=entries)
    leak = _name([_container(entries)], {"Net": model})
    assert (leak.kind, leak.owner, leak.what, leak.where) == ("container", "Net.kept", what, "host")
    assert leak.bytes_per_step == pytest.approx(size, abs=8)
    assert remedy in leak.describe()
    assert "from step 100 to 148" in leak.describe()


def test_hooks_and_metrics_are_known_by_their_owner() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    for _ in range(20):
        model[1].register_forward_hook(lambda *_: None)
    hooks = _name([_container(model[1]._forward_hooks)], {"Net": model})
    assert (hooks.kind, hooks.owner) == ("hooks", "Net.1._forward_hooks")
    assert "remove()" in hooks.remedy
    model.metric = CatMetric()
    model.metric.update(torch.zeros(3))
    metric = _name([_container(model.metric.value)], {"Net": model})
    assert metric.owner == "Net.metric.value"
    assert "reset()" in metric.remedy


def test_a_graph_goes_before_all_else_and_what_is_measured_before_what_is_guessed() -> None:
    model = SimpleNamespace(total=torch.ones(3, 333, requires_grad=True) * 2)
    kind = "torch.float32 [3, 333] on cpu from MulBackward0"
    grown = [Grown("tensors", kind, kind, 1.0, 900.0), Grown("graph", kind, "the graph", 4.0, 2048.0)]
    leak = name_leak(grown, {"Net": model}, (0.0, 7000.0), torch.device("cuda:1"), [1, 2])
    assert leak is not None
    assert (leak.kind, leak.owner, leak.where, leak.bytes_per_step) == ("graph", "Net.total", "cuda:1", 7000.0)


def test_what_is_known_is_not_told_again_nor_are_its_parts() -> None:
    model = SimpleNamespace(one=[0] * 20, other=[1] * 20)
    kind = "torch.float32 [] on cpu"
    grown = [Grown("tensors", kind, kind, 1.0, 516.0), _container(model.one), _container(model.other)]
    assert _name(grown, {"Net": model}).owner == "Net.one"
    assert _name(grown, {"Net": model}, known={"Net.one"}).owner == "Net.other"
    assert _name(grown, {"Net": model}, known={"Net.one", "Net.other"}) is None


def test_memory_that_nothing_accounts_for_is_told_as_such() -> None:
    leak = _name([], {}, slopes=(5000.0, 0.0))
    assert (leak.kind, leak.owner, leak.bytes_per_step) == ("unnamed", "", 5000.0)
    assert "No Python object accounts for it" in leak.describe()
    assert leak.identity == "unnamed memory"
    assert Leak(kind="objects", what="x", site="a.py:3").describe().count("Allocated in a.py:3.") == 1


def test_sizes_are_told_in_the_unit_that_fits() -> None:
    assert [size_text(size) for size in (0, 1000, 1 << 20, 5 << 40, 3 << 50)] == [
        "0 B",
        "1\u202f000 B",
        "1.00 MiB",
        "5.00 TiB",
        "3\u202f072.00 TiB".replace(".00", ""),
    ]

"""The search in real runs, with a memory that is scarce where the test says; a run with it is the run without it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader

from lightning_speedkit.memory.batch_size import BatchSizeSearch
from tests.memory.scarce import Data, Net, Steps, dataset, fit, new_trainer, same


@pytest.mark.parametrize("where", ["forward", "backward", "step", "validation"])
@pytest.mark.parametrize("most", [3, 32])
def test_the_largest_size_that_fits_is_exact_wherever_memory_runs_out(where: str, most: int) -> None:
    net, search = Net(most, where), BatchSizeSearch(start=8, limit=50)
    fit(search, net, max_epochs=1)
    sizes = {trial.size: trial for trial in search.trials}
    assert search.batch_size == most
    assert search.trials[0].size == 8
    assert len(search.trials) <= 2 * math.log2(50) + 2
    assert sizes[most].fits
    assert not sizes[most + 1].fits
    assert sizes[most + 1].failed_in == ("validation" if where == "validation" else "training")
    assert net.sizes == {most, 60 % most} - {0}  # what the training had


@pytest.mark.parametrize(("net", "precision"), [(Net, "32"), (Net, "16"), (Steps, "32")])
def test_a_run_after_a_search_is_the_run_with_that_size(net: Any, precision: str) -> None:
    def given(size: int) -> Any:
        return DataLoader(dataset(), size, shuffle=True), DataLoader(dataset(20), batch_size=5)

    def plugins() -> Any:
        scaler = torch.amp.GradScaler("cpu", 1024.0)
        return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]} if precision == "16" else {}

    # nothing changes, and something does; loaders made before have drawn their random numbers, and are made again
    for before in (13, 4) if net is Net else (13,):
        search = BatchSizeSearch(start=10, limit=40)
        plain, _ = fit(None, net(13), given(13), **plugins())
        other, _ = fit(search, net(13), given(before), **plugins())
        assert search.batch_size == 13
        for name, value in plain.items():
            assert same(other[name], value), name


def test_nothing_fits() -> None:
    net = Net(0, "validation")
    net.body[1] = nn.Identity()  # BatchNorm takes no batch of one sample
    with pytest.raises(torch.OutOfMemoryError, match="Not even a batch of 1 fits: memory ran out in validation"):
        fit(BatchSizeSearch(), net)


@pytest.mark.parametrize(("limit", "size"), [(None, 60), (7, 7), (100, 60)])
def test_the_limit_and_the_samples_there_are(limit: int | None, size: int) -> None:
    search = BatchSizeSearch(start=5, limit=limit)
    _, run = fit(search, Net(), max_epochs=1)
    assert search.batch_size == size == max(trial.size for trial in search.trials)
    assert search.trials[0].size == 5
    assert run.global_step == math.ceil(60 / size)


def test_the_margin_is_tried() -> None:
    net, search = Net(24), BatchSizeSearch(margin=0.25)
    fit(search, net, max_epochs=1)
    assert search.batch_size == 19  # of 19.2: 24 samples fit
    assert [t.samples for t in search.trials if t.size == 19] == [24]
    assert net.sizes == {19, 3}


def test_a_resumed_run_keeps_its_size(tmp_path: Path) -> None:
    _, run = fit(BatchSizeSearch(scale_lr="linear"), Net(13), Data(), max_epochs=1)
    run.save_checkpoint(tmp_path / "a.ckpt")
    for data in (Data(), None):
        net, search = Steps(30), BatchSizeSearch(scale_lr="linear")
        run = new_trainer(search)
        given = (data,) if data else (DataLoader(dataset(), 4), DataLoader(dataset(20), 5))
        run.fit(net, *given, ckpt_path=tmp_path / "a.ckpt")
        assert (search.batch_size, search.trials, net.sizes) == (13, (), {13, 8})
        assert run.global_step == 10


def test_skipped_where_nothing_is_to_be_tried(caplog: pytest.LogCaptureFixture) -> None:
    search = BatchSizeSearch()
    with caplog.at_level("INFO"):
        fit(search, Net(), fast_dev_run=True)
    assert "tries nothing" in caplog.text
    assert search.trials == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start": 0}, "start=0 must be 1 or more"),
        ({"start": 8, "limit": 4}, "start=8 is above limit=4"),
        ({"steps": 1}, "steps=1 must be 2"),
        ({"target": "speed"}, "target='speed' is unknown"),
        ({"margin": -0.1}, "margin=-0.1"),
        ({"margin": 10}, "margin=10 must be from 0 to 1"),
        ({"scale_lr": "cubic"}, "scale_lr='cubic'"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchSizeSearch(**arguments)
    with pytest.raises(TypeError, match="start='2' must be a whole number"):
        BatchSizeSearch(start="2")  # type: ignore[arg-type]


def test_loaders_made_before_are_made_again_and_told() -> None:
    net = Steps()
    with pytest.warns(UserWarning, match="changed the batch size from 4 to 20, so a schedule may have been made"):
        _, run = fit(BatchSizeSearch(start=20, limit=20), net, max_epochs=1)
    assert (net.sizes, run.global_step) == ({20}, 3)

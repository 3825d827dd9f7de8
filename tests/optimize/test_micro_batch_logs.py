"""What pieces log is what the whole batch would have logged."""

from __future__ import annotations

from typing import Any

import torch
from torchmetrics import MeanMetric

from lightning_speedkit.optimize.micro_batch_logs import RecordedLogs, joined_logs


def _pieces(*calls: list[tuple[Any, ...]], **options: Any) -> list[RecordedLogs]:
    pieces = []
    for piece in calls:
        logs = RecordedLogs()
        for call in piece:
            logs.record(call, options)
        pieces.append(logs)
    return pieces


def _values(joined: RecordedLogs) -> dict[str, float]:
    return {name: float(value) for name, value, _ in joined.calls}


def test_means_are_over_samples_and_other_reductions_are_kept() -> None:
    x = torch.tensor([1.0, 2.0, 6.0])
    for reduce_fx, of in (("mean", x.mean()), ("sum", x.sum()), (max, x.max()), ("min", x.min()), (torch.sum, x.sum())):
        each = {"mean": torch.mean, "sum": torch.sum, max: torch.max, "min": torch.min, torch.sum: torch.sum}[reduce_fx]  # type: ignore[index]
        pieces = _pieces([("v", each(x[:2]))], [("v", each(x[2:]))], reduce_fx=reduce_fx)
        assert _values(joined_logs(pieces, [2, 1])) == {"v": of.item()}


def test_numbers_whole_numbers_and_names_that_only_some_pieces_log() -> None:
    pieces = _pieces([("a", 1), ("b", torch.tensor(2))], [("a", 4)], [("a", 4), ("b", torch.tensor(5)), ("c", True)])
    assert _values(joined_logs(pieces, [2, 1, 1])) == {"a": 2.5, "b": 3.0, "c": 1.0}
    assert [name for name, *_ in joined_logs(pieces, [2, 1, 1]).calls] == ["a", "b", "c"]


def test_arguments_are_kept_and_batch_sizes_summed() -> None:
    pieces = _pieces([("a", 1.0, True)], [("a", 3.0, True)])
    assert joined_logs(pieces, [1, 1]).calls[0][2] == {"prog_bar": True}
    pieces = _pieces([("a", 1.0)], [("a", 3.0)], batch_size=4, on_epoch=True)
    assert joined_logs(pieces, [4, 4]).calls[0][2] == {"batch_size": 8, "on_epoch": True}


def test_a_metric_is_logged_once_and_a_value_is_kept_as_it_was() -> None:
    metric = MeanMetric()
    assert joined_logs(_pieces([("m", metric)], [("m", metric)]), [1, 1]).calls == [("m", metric, {})]
    logs, value = RecordedLogs(), torch.ones((), requires_grad=True)
    logs.record(("v", value), {})
    with torch.no_grad():
        value.add_(1)
    ((_, kept, _),) = logs.calls
    assert (kept.item(), kept.requires_grad) == (1.0, False)


def test_means_are_by_weight_and_a_piece_of_no_weight_may_log_no_number() -> None:
    pieces = _pieces([("loss", 1.0)], [("loss", torch.tensor(float("nan")))], [("loss", torch.tensor(4.0))])
    for weights in ([0.75, 0.0, 0.25], [torch.tensor(3), torch.tensor(0), torch.tensor(1)]):
        assert _values(joined_logs(pieces, [2, 2, 2], weights)) == {"loss": 1.75}

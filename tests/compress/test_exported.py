"""Exported programs: which dimensions are free, what is refused, and that nothing of torch stays changed."""

from __future__ import annotations

import io
import logging
import warnings
from contextlib import redirect_stderr, redirect_stdout, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_speedkit.compress.calls import Call
from lightning_speedkit.compress.exported import ExportedPart, ProgramModule, export_part, quiet_export
from lightning_speedkit.errors import QuantizationError


class _Weighted(nn.Module):
    """``scale * (x @ w)`` with w = (2, -3), summed over the length of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, -3.0]))

    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Any]:
        each = x @ self.weight
        return {"each": each, "more": [each.sum(1) * scale, None]}


def _call(batch: int, length: int) -> Call:
    return Call("net", (torch.ones(batch, length, 2),), {"scale": torch.tensor(10.0)})


def _export(*sizes: tuple[int, int]) -> ExportedPart:
    return export_part(_Weighted().eval(), "net", [_call(*size) for size in sizes])


@pytest.mark.parametrize("batch", [1, 4])
def test_the_batch_is_free_even_if_only_one_sample_was_seen(batch: int) -> None:
    part = _export((batch, 3))
    assert part.name == "net"
    x = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]]).repeat(5, 1, 1)  # 2, -3 and -1: -2 together
    each, total = part.program.module()(x, torch.tensor(10.0))
    assert each.tolist() == [[2.0, -3.0, -1.0]] * 5
    assert total.tolist() == [-20.0] * 5


def test_a_length_is_free_only_if_it_differed() -> None:
    longer = (torch.ones(2, 7, 2), torch.tensor(1.0))
    assert _export((4, 3), (4, 5)).program.module()(*longer)[1].tolist() == [-7.0, -7.0]
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        _export((4, 3), (2, 3)).program.module()(*longer)


def test_the_inputs_are_those_of_every_call_and_the_example_is_a_copy() -> None:
    calls = [_call(1, 3), _call(4, 3)]
    part = export_part(_Weighted().eval(), "net", calls)
    assert [[tuple(t.shape) for t in tensors] for tensors in part.inputs] == [[(1, 3, 2), ()], [(4, 3, 2), ()]]
    assert part.form.count == 2
    assert [call.args[0].shape[0] for call in calls] == [1, 4]


def test_the_network_keeps_its_numbers() -> None:
    net = nn.Sequential(nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3)).eval()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    export_part(net, "", [Call("", (torch.randn(4, 2, 5),), {})])
    for name, value in net.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    assert all(p.requires_grad and type(p) is nn.Parameter for p in net.parameters())


def test_calls_of_several_kinds_are_refused() -> None:
    other = Call("", (torch.ones(4, 3, 2),), {"scale": 10.0})
    with pytest.raises(QuantizationError, match=r"^it is called in several ways \(scale is 10.0, and was a tensor\)$"):
        export_part(_Weighted().eval(), "", [_call(4, 3), other])


class _Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x


def test_a_branch_on_values_is_refused_in_one_line_and_in_silence() -> None:
    shown = io.StringIO()
    with (
        redirect_stderr(shown),
        redirect_stdout(shown),
        pytest.raises(QuantizationError, match=r"^it cannot be exported \(\w+: .+\)$") as caught,
    ):
        export_part(_Branching().eval(), "", [Call("", (torch.ones(4),), {})])
    assert "\n" not in str(caught.value)
    assert shown.getvalue() == ""


def test_a_program_is_called_like_the_network_and_is_not_trained() -> None:
    part = _export((4, 3))
    module = ProgramModule(part.program, part.form)
    answer = module(torch.ones(2, 3, 2), scale=torch.tensor(0.5))
    assert list(answer) == ["each", "more"]
    assert answer["more"][0].tolist() == [-1.5, -1.5]
    assert answer["more"][1] is None
    assert not answer["each"].requires_grad
    assert [p.requires_grad for p in module.parameters()] == [False]
    assert module.train() is module
    assert not nn.Sequential(module).train()[0].training
    with pytest.raises(ValueError, match=r": scale is 0.5, and was a tensor\."):
        module(torch.ones(2, 3, 2), scale=0.5)


@pytest.mark.parametrize("fast", [True, False])
def test_an_export_is_quiet_and_leaves_torch_as_it_was(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("torch.onnx")
    monkeypatch.setattr(logger, "level", logging.INFO)
    was = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(fast)
    try:
        with warnings.catch_warnings(record=True) as shown, suppress(KeyError), quiet_export():
            assert not torch.backends.mha.get_fastpath_enabled()
            assert not logger.isEnabledFor(logging.ERROR)
            warnings.warn("inside", stacklevel=1)
            raise KeyError
        assert shown == []
        assert torch.backends.mha.get_fastpath_enabled() is fast
        assert logger.level == logging.INFO
    finally:
        torch.backends.mha.set_fastpath_enabled(was)


@pytest.mark.parametrize(
    ("x", "told"),
    [
        (torch.ones(2, 5), r"takes input of shape \(any, 3\) and dtype float32, and got shape \(2, 5\)"),
        (torch.ones(3), r"give input\.unsqueeze\(0\)"),
        (torch.ones(2, 3).double(), r"dtype float64\. Convert it: input\.to\(torch\.float32\)"),
    ],
)
def test_an_input_that_a_program_does_not_take_is_told(x: Tensor, told: str) -> None:
    exported = export_part(nn.Linear(3, 2).eval(), "", [Call("", (torch.ones(4, 3),), {})])
    module = ProgramModule(exported.program, exported.form)
    assert module(torch.ones(2, 3)).shape == (2, 2)
    with pytest.raises(ValueError, match=told):
        module(x)

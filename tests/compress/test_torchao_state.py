"""The state of torchao's weights as plain tensors: what is in the file, and what is refused when it is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_speedkit.compress.torchao_state as torchao_state
from lightning_speedkit.compress.artefact import load_quantized
from lightning_speedkit.compress.torchao_state import (
    TorchaoState,
    inner_tensors,
    load_torchao,
    pack_int4,
    unpack_int4,
)
from lightning_speedkit.compress.torchao_weights import quantize_layers
from lightning_speedkit.errors import MissingExtraError, QuantizationError


def _net(width: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, width), nn.BatchNorm1d(width), nn.Linear(width, 2)).eval().requires_grad_(False)


def _written(folder: Path, bits: int = 8) -> tuple[nn.Sequential, dict[str, Any]]:
    """A network whose first layer is quantized, and what the file of it holds."""
    net, scheme = _net(), f"weight-only-int{bits}"
    net[1].running_mean.fill_(0.25)
    net[1].num_batches_tracked.fill_(7)
    quantize_layers(net, ["0"], scheme, "cpu")
    recipe = {"engine": f"torchao-weight-int{bits}", "scheme": scheme, "device": "cpu", "layers": ["0"]}
    assert TorchaoState(net, recipe).write(folder) == {"files": ["model.pt"]}
    return net, torch.load(folder / "model.pt", weights_only=True)


def test_two_values_in_a_byte_by_hand() -> None:
    # the first in the low half, and 8 is added to each: -8, 7 is 0x0 and 0xf
    values = torch.tensor([[-8, 7], [7, -8], [0, -1], [1, 2]], dtype=torch.int8)
    packed = pack_int4(values)
    assert packed.dtype == torch.uint8
    assert packed.flatten().tolist() == [0xF0, 0x0F, 0x78, 0xA9]
    again = unpack_int4(packed)
    assert again.is_contiguous()
    assert torch.equal(again, values)


def test_packing_keeps_leading_dimensions() -> None:
    values = torch.randint(-8, 8, (2, 3, 4), dtype=torch.int8)
    assert pack_int4(values).shape == (2, 3, 2)
    assert torch.equal(unpack_int4(pack_int4(values)), values)


def test_a_plain_tensor_has_nothing_inside() -> None:
    assert inner_tensors(torch.ones(2)) == {}
    assert inner_tensors(nn.Parameter(torch.ones(2))) == {}


@pytest.mark.parametrize("bits", [8, 4])
def test_the_file_holds_plain_tensors_that_rebuild_the_weight(bits: int, tmp_path: Path) -> None:
    net, content = _written(tmp_path, bits)
    assert content["state"].keys() | content["inner"].keys() == net.state_dict().keys()
    assert list(content["inner"]) == ["0.weight"]
    assert all(type(value) is Tensor for value in (*content["state"].values(), *content["inner"]["0.weight"].values()))
    inner = content["inner"]["0.weight"]
    values = inner["qdata"].to(torch.int16)
    if bits == 4:
        assert inner["qdata"].dtype == torch.uint8
        values = torch.stack([values % 16 - 8, values // 16 - 8], dim=2).reshape(3, 64)
    steps = inner["scale"].repeat_interleave(64 // inner["scale"].shape[1], dim=1)
    answer = torch.eye(64) @ (values * steps).T + content["state"]["0.bias"]
    torch.testing.assert_close(net[0](torch.eye(64)), answer, rtol=0, atol=1e-5)


def test_the_file_does_not_follow_the_network(tmp_path: Path) -> None:
    net, content = _written(tmp_path)
    net[1].running_mean.fill_(99.0)
    again = torch.load(tmp_path / "model.pt", weights_only=True)
    assert torch.equal(again["state"]["1.running_mean"], torch.full((3,), 0.25))
    assert again["recipe"] == content["recipe"]


@pytest.mark.parametrize("bits", [8, 4])
def test_weights_and_buffers_of_another_network_are_replaced(bits: int, tmp_path: Path) -> None:
    net, content = _written(tmp_path, bits)
    other = _net().requires_grad_(True)
    again = load_torchao(other, content)
    x = torch.randn(5, 64)
    assert torch.equal(again(x), net(x))
    assert int(again.get_buffer("1.num_batches_tracked")) == 7
    assert not any(value.requires_grad for value in again.parameters())


def _gone(content: dict[str, Any]) -> None:
    del content["state"]["1.running_mean"]


def _another_name(content: dict[str, Any]) -> None:
    content["state"]["3.weight"] = content["state"].pop("2.weight")


def _another_shape(content: dict[str, Any]) -> None:
    content["state"]["2.weight"] = torch.ones(2, 1)  # would be broadcast


def _part_gone(content: dict[str, Any]) -> None:
    del content["inner"]["0.weight"]["scale"]


def _part_of_another_shape(content: dict[str, Any]) -> None:
    content["inner"]["0.weight"]["qdata"] = torch.ones(1, 64, dtype=torch.int8)  # would be broadcast


def _part_of_another_dtype(content: dict[str, Any]) -> None:
    content["inner"]["0.weight"]["qdata"] = torch.ones(3, 64)  # would be rounded


def _layer_gone(content: dict[str, Any]) -> None:
    content["recipe"]["layers"] = ["body"]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_gone, r"its state has other names: \['1.running_mean'\]"),
        (_another_name, r"its state has other names: \['2.weight', '3.weight'\]"),
        (_another_shape, r"2.weight has shape \(2, 3\), in the file \(2, 1\)"),
        (_part_gone, "'scale'"),
        (_part_of_another_shape, r"0.weight has shape \(3, 64\).* in the file \(1, 64\)"),
        (_part_of_another_dtype, "0.weight has shape"),
        (_layer_gone, "body"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_and_the_model_untouched(damage: Any, said: str, tmp_path: Path) -> None:
    _, content = _written(tmp_path)
    damage(content)
    torch.save(content, tmp_path / "model.pt")
    net = _net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(QuantizationError, match=rf"model\.pt does not fit a Sequential like this one .*{said}"):
        load_quantized(tmp_path, net)
    torch.testing.assert_close(dict(net.state_dict()), before, rtol=0, atol=0)


def test_packed_values_of_another_width_are_refused(tmp_path: Path) -> None:
    _, content = _written(tmp_path, 4)
    content["inner"]["0.weight"]["qdata"] = content["inner"]["0.weight"]["qdata"][:, :-1]
    with pytest.raises(QuantizationError, match=r"0.weight has shape \(3, 64\).* in the file \(3, 62\)"):
        load_torchao(_net(), content)


def test_without_torchao_the_line_that_installs_it_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, content = _written(tmp_path)
    monkeypatch.setattr(torchao_state, "find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"needs torchao, .*pip install 'lightning-speedkit\[quant\]'"):
        load_torchao(_net(), content)

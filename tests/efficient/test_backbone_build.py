from __future__ import annotations

import socket
from typing import Any

import pytest
import torch
from torch import nn

from lightning_speedkit.architecture import backbone_build
from lightning_speedkit.architecture.backbone_build import (
    FAMILIES,
    build_backbone,
    checked_names,
    checked_task,
    published_accuracies,
)
from lightning_speedkit.errors import MissingExtraError
from tests.efficient.tiny_backbones import registered

ALL = [name for family in FAMILIES.values() for name in family]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.parametrize("name", ["torchvision:mobilenet_v3_small", "timm:mobilenetv3_small_050"])
def test_channels_and_classes_change_the_two_layers_alone(name: str) -> None:
    three, one = build_backbone(name, (3, 32, 32), 10), build_backbone(name, (1, 32, 32), 7)
    assert one.eval()(torch.zeros(2, 1, 32, 32)).shape == (2, 7)
    first = next(m for m in three.modules() if isinstance(m, nn.Conv2d))
    last = [m for m in three.modules() if isinstance(m, nn.Linear)][-1]
    fewer = first.out_channels * 9 * 2 + (last.in_features + 1) * 3  # two channels of 3x3 weights, three classes
    assert _count(three) - _count(one) == fewer
    new = next(m for m in one.modules() if isinstance(m, nn.Conv2d))
    assert (new.stride, new.padding, new.bias) == (first.stride, first.padding, None)


def test_a_transformer_is_made_for_the_size() -> None:
    net = build_backbone("timm:vit_tiny_patch16_224", (1, 32, 48), 5)
    assert net.eval()(torch.zeros(1, 1, 32, 48)).shape == (1, 5)
    assert net.pos_embed.shape[1] == 1 + 2 * 3
    with pytest.raises(ValueError, match="square images only, got 32x48"):
        build_backbone("torchvision:vit_b_16", (3, 32, 48), 5)


def test_grouped_first_convolutions_are_refused() -> None:
    with (
        registered(grouped=lambda n: nn.Sequential(nn.Conv2d(3, 3, 1, groups=3))),
        pytest.raises(ValueError, match="first convolution '0' takes 3 channels in groups, not 1"),
    ):
        build_backbone("torchvision:grouped", (1, 8, 8), 3)


def test_the_families_are_known_to_the_libraries() -> None:
    assert checked_names(None) == tuple(ALL)
    assert checked_names(ALL) == tuple(ALL)
    assert checked_names(["resnet", "timm:resnet18.a1_in1k", "resnet"]) == (
        "torchvision:resnet18",
        "timm:resnet18.a1_in1k",
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("torchvision:mobilenet_v3_smal", "Did you mean 'torchvision:mobilenet_v3_small'"),
        ("timm:efficientnet_b00", "timm has no classifier 'efficientnet_b00'. Did you mean 'timm:efficientnet_b0'"),
        ("resnet18", "must be 'timm:...'.*Did you mean 'torchvision:resnet18' or 'timm:resnet18'"),
        ("torchvison:resnet18", "Did you mean 'torchvision:resnet18'"),
        ("mobilnet", "families.*Did you mean 'mobilenet'"),
        ("torchvision:fcn_resnet50", "torchvision has no classifier 'fcn_resnet50'"),
        ("timm:hf-hub:me/it", "timm has no classifier 'hf-hub:me/it'"),
    ],
)
def test_unknown_names_get_the_nearest(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checked_names([name])


@pytest.mark.parametrize("candidates", ["torchvision:resnet18", 3, [3]])
def test_what_is_no_list_of_names_is_refused(candidates: Any) -> None:
    with pytest.raises(TypeError, match="name"):
        checked_names(candidates)
    with pytest.raises(ValueError, match="empty"):
        checked_names([])


def test_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backbone_build, "_is_there", lambda library: library == "torchvision")
    names = checked_names(None)
    assert names == tuple(name for name in ALL if name.startswith("torchvision:"))
    with pytest.raises(MissingExtraError, match=r"timm:resnet18 needs timm.*pip install 'lightning-speedkit\[arch\]'"):
        checked_names(["timm:resnet18"])
    assert checked_names(["regnet"]) == ("torchvision:regnet_y_400mf",)
    with pytest.raises(MissingExtraError, match="timm:vit_tiny_patch16_224 needs timm"):
        checked_names(["vit"])
    monkeypatch.setattr(backbone_build, "_is_there", lambda library: False)
    with pytest.raises(MissingExtraError, match=r"timm or torchvision.*pip install 'lightning-speedkit\[arch\]'"):
        checked_names(None)


@pytest.mark.parametrize("shape", [(3, 64), (3, 64, 0), "abc", 64, (3, 64.0, 64), (True, 8, 8)])
def test_wrong_shapes(shape: Any) -> None:
    with pytest.raises(ValueError, match=r"must be channels, height and width of one image, such as \(3, 64, 64\)"):
        checked_task(shape, 10)


def test_published_accuracies_are_those_of_torchvision_s_pages() -> None:
    names = ["torchvision:resnet18", "timm:resnet18", "torchvision:mine", "torchvision:mobilenet_v3_small"]
    with registered(mine=lambda n: nn.Identity()):
        found = published_accuracies(names)
    # https://docs.pytorch.org/vision/stable/models.html, "Acc@1"
    assert found == pytest.approx({"torchvision:resnet18": 0.69758, "torchvision:mobilenet_v3_small": 0.67668})


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())

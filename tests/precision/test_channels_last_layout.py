"""Layouts against strides worked out by hand: of shape (n, c, h, w), channels-last strides are (h*w*c, 1, w*c, c)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_speedkit.precision.channels_last_layout import (
    convert_images,
    find_format_breaks,
    holds_convolutions,
    to_channels_last_,
    to_plain_format_,
    watch_formats,
)

_IMAGE = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).view(2, 3, 4, 5)
_PLAIN, _LAST = (60, 20, 5, 1), (60, 1, 15, 3)


class Back(nn.Module):
    """Gives images back in the plain order."""

    def forward(self, x: Tensor, *, also: Tensor | None = None) -> Tensor:
        return (x if also is None else also).contiguous()


def test_only_weights_with_two_orders_change_and_stay_the_same_objects() -> None:
    model = nn.ModuleDict(
        {
            "plain": nn.Conv2d(3, 8, 3),
            "grouped": nn.Conv2d(6, 8, 3, groups=2),
            "transposed": nn.ConvTranspose2d(4, 2, (3, 2)),
            "one channel": nn.Conv2d(1, 8, 3),
            "one pixel": nn.Conv2d(3, 8, 1),
            "depthwise": nn.Conv2d(4, 4, 3, groups=4),
            "1d": nn.Conv1d(3, 8, 3),
            "lazy": nn.LazyConv2d(8, 3),
            "linear": nn.Linear(3, 8),
        }
    )
    found = {name: (weight, weight.stride(), weight.clone()) for name, weight in _weights(model).items()}
    assert to_channels_last_(model) == ("plain", "grouped", "transposed")
    assert _weights(model)["plain"].stride() == (27, 1, 9, 3)  # (8, 3, 3, 3)
    assert _weights(model)["grouped"].stride() == (27, 1, 9, 3)  # (8, 3, 3, 3): 6 channels in 2 groups
    assert _weights(model)["transposed"].stride() == (12, 1, 4, 2)  # (4, 2, 3, 2)
    to_plain_format_(model, ("plain", "grouped", "transposed"))
    for name, weight in _weights(model).items():
        assert weight is found[name][0]
        assert weight.stride() == found[name][1]
        assert torch.equal(weight, found[name][2])


def test_gradients_follow_back() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3))
    paths = to_channels_last_(model)
    model(_IMAGE.contiguous(memory_format=torch.channels_last)).square().sum().backward()
    before: Any = model[0].weight.grad
    assert before.stride() == (27, 1, 9, 3)
    values = before.clone()
    to_plain_format_(model, paths)
    assert model[0].weight.grad.stride() == (27, 9, 3, 1)
    assert torch.equal(model[0].weight.grad, values)


def test_images_are_converted_wherever_they_are_and_nothing_else_is() -> None:
    volume, numbers, flags = torch.ones(1, 2, 3, 4, 5), torch.ones(2, 3), _IMAGE.long()
    args, kwargs = (_IMAGE, [volume, {"deep": _IMAGE}], "text"), {"x": _IMAGE, "numbers": numbers, "flags": flags}
    (image, (same_volume, nested), text), named = convert_images(nn.Identity(), args, kwargs)
    for converted in (image, nested["deep"], named["x"]):
        assert converted.stride() == _LAST
        assert torch.equal(converted, _IMAGE)
    assert _IMAGE.stride() == _PLAIN  # the caller's own
    assert (same_volume is volume, named["numbers"] is numbers, named["flags"] is flags, text) == (*[True] * 3, "text")


def test_an_image_that_lies_so_already_is_not_copied() -> None:
    image = _IMAGE.contiguous(memory_format=torch.channels_last)
    (converted,), _ = convert_images(nn.Identity(), (image,), {})
    assert converted.data_ptr() == image.data_ptr()


def test_the_innermost_layers_that_break_are_found_once_each() -> None:
    back, image = Back(), _IMAGE.contiguous(memory_format=torch.channels_last)
    model = nn.ModuleDict({"whole": nn.Sequential(nn.ReLU(), back), "keeps": nn.ReLU()})

    def call() -> None:
        for _ in range(2):
            model["whole"](image)
            model["keeps"](image)
            model["keeps"](_IMAGE)  # plain in, plain out

    assert find_format_breaks(model, call) == ("whole.1",)


def test_images_in_keywords_count() -> None:
    image, model = _IMAGE.contiguous(memory_format=torch.channels_last), nn.ModuleList([Back()])
    assert find_format_breaks(model, lambda: model[0](_IMAGE, also=image)) == ("0",)


def test_one_channel_or_one_pixel_is_no_break() -> None:
    model = nn.ModuleList([Back()])
    for image in (torch.ones(2, 1, 4, 4), torch.ones(2, 3, 1, 1)):
        last = image.to(memory_format=torch.channels_last)
        assert find_format_breaks(model, lambda last=last: model[0](last)) == ()


def test_hooks_are_gone_also_after_an_error() -> None:
    model = nn.Sequential(nn.ReLU())
    with pytest.raises(ZeroDivisionError):
        find_format_breaks(model, lambda: 1 // 0)
    assert not model[0]._forward_hooks
    found: list[str] = []
    handles = watch_formats(model, found)
    assert len(handles) == 1  # the layer, not what it is in
    for handle in handles:
        handle.remove()


def test_what_holds_convolutions() -> None:
    assert holds_convolutions(nn.Sequential(nn.ReLU(), nn.Sequential(nn.Conv2d(1, 1, 1))))
    assert holds_convolutions(nn.ConvTranspose2d(1, 1, 1))
    assert not holds_convolutions(nn.Sequential(nn.Conv1d(1, 1, 1), nn.Linear(1, 1)))


def _weights(model: nn.ModuleDict) -> dict[str, Any]:
    return {name: layer.weight for name, layer in model.items() if not nn.parameter.is_lazy(layer.weight)}


def test_a_layer_that_was_replaced_is_passed_over() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))
    paths = to_channels_last_(model)
    model[0] = nn.Identity()
    to_plain_format_(model, (*paths, "gone.0"))
    assert model[1].weight.is_contiguous()


def test_a_weight_that_is_computed_at_each_call_is_left_out() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3)), nn.Conv2d(4, 4, 3))
    assert to_channels_last_(model) == ("1",)

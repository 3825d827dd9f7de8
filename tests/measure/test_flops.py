"""Operations worked out by hand, of kernels that torch's counter does not look into."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_speedkit.measure.flops import count_flops

WIDTH, LENGTH, HIDDEN = 8, 6, 16
# of one layer: four projections, scores and sums, two layers of the network
PRODUCTS = 4 * LENGTH * WIDTH * WIDTH + 2 * LENGTH * LENGTH * WIDTH + 2 * LENGTH * WIDTH * HIDDEN


@pytest.mark.parametrize("grad", [True, False])
def test_products_of_a_transformer_count_on_its_fast_path_too(grad: bool) -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, HIDDEN, batch_first=True)
    net = nn.TransformerEncoder(layer, 2).eval()
    x = torch.zeros(3, LENGTH, WIDTH)
    with torch.set_grad_enabled(grad):
        assert count_flops(lambda: net(x)) == 2 * 2 * 3 * PRODUCTS
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_convolution_in_groups() -> None:
    conv = nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2)
    assert count_flops(lambda: conv(torch.zeros(1, 4, 8, 8))) == 2 * (8 * 4 * 4) * (2 * 9)


def test_settings_are_put_back_after_an_error() -> None:
    def fail() -> None:
        assert not torch.backends.mha.get_fastpath_enabled()
        raise RuntimeError("stop")

    flash = torch.backends.cuda.flash_sdp_enabled()
    with pytest.raises(RuntimeError, match="stop"):
        count_flops(fail)
    assert torch.backends.mha.get_fastpath_enabled()
    assert torch.backends.cuda.flash_sdp_enabled() == flash

from __future__ import annotations

import copy

import torch

from lightning_speedkit.compress.shrink_cut import apply_plan
from lightning_speedkit.compress.shrink_resize import original_sizes
from lightning_speedkit.compress.shrink_snapshot import put_back, take_snapshot
from tests.compress.shrink_models import Residual, images, plan_of, randomised


def test_everything_comes_back_and_settings_stay() -> None:
    model = randomised(Residual()).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(images()).square().mean().backward()
    optimizer.step()
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    objects = list(model.parameters())
    snapshot = take_snapshot(model, [optimizer])
    apply_plan(model, plan_of(model), [optimizer])
    for _ in range(2):
        optimizer.zero_grad()
        model(images()).square().mean().backward()
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.05
    put_back(model, [optimizer], snapshot)
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()["state"]), kept, rtol=0, atol=0)
    assert all(one is other for one, other in zip(model.parameters(), objects, strict=True))
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert (model.inner.out_channels, model.norm.num_features) == (12, 8)
    assert original_sizes(model) == {}
    model(images()).square().mean().backward()  # and it trains on
    optimizer.step()

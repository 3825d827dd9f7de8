"""Which layers stay and why, and that a replacement is put everywhere the layer was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from lightning_speedkit.architecture.lighten_layers import copy_model, find_layers, lighter_layer, replace_layers_


class OwnConv(nn.Conv2d):
    pass


def _hooked() -> nn.Linear:
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda *_: None)
    return layer


def _pruned() -> nn.Linear:
    layer = nn.Linear(4, 4)
    prune.l1_unstructured(layer, "weight", 0.5)
    return layer


def _not_finite() -> nn.Linear:
    layer = nn.Linear(4, 4)
    nn.init.constant_(layer.bias, 0.0)
    nn.init.constant_(layer.weight, float("inf"))
    return layer


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (OwnConv(4, 4, 3), "OwnConv is a class of its own"),
        (nn.Conv2d(4, 4, 3, groups=2), "2 groups already"),
        (parametrizations.weight_norm(nn.Linear(4, 4)), "computed at each call"),
        (parametrizations.spectral_norm(nn.Conv2d(4, 4, 3)), "computed at each call"),
        (_pruned(), "computed at each call"),
        (_hooked(), "hooks"),
        (_not_finite(), "not finite"),
        (nn.LSTM(4, 4), "LSTM is not replaced"),
        (nn.ConvTranspose2d(4, 4, 3), "ConvTranspose2d is not replaced"),
    ],
)
def test_what_cannot_be_replaced_is_named_with_the_reason(layer: nn.Module, reason: str) -> None:
    layers, left = find_layers(nn.ModuleDict({"odd": layer, "plain": nn.Linear(4, 4)}))
    assert list(layers) == ["plain"]
    assert reason in left["odd"]


def test_attention_stays_whole_and_the_feed_forward_is_found() -> None:
    layers, left = find_layers(nn.TransformerEncoderLayer(16, 2))
    assert list(layers) == ["linear1", "linear2"]
    assert "one parameter" in left["self_attn"]
    assert "reads its weight directly" in left["self_attn.out_proj"]


def test_shared_parameters_stay_and_a_module_under_two_names_is_one() -> None:
    net = nn.ModuleDict({"emb": nn.Embedding(9, 4), "head": nn.Linear(4, 9, bias=False), "a": nn.Linear(4, 4)})
    net["b"] = net["a"]
    net["head"].weight = net["emb"].weight  # type: ignore[assignment]
    layers, left = find_layers(net)
    assert list(layers) == ["a"]
    assert left == {"head": "it shares a parameter with emb"}
    new = lighter_layer(layers["a"], 1, 2, warm_start=True)
    replace_layers_(net, {"a": new})
    assert net["a"] is new
    assert net["b"] is new


def test_skip_takes_names_parents_and_wildcards() -> None:
    net = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4), nn.Linear(4, 4))
    assert list(find_layers(net, ["0"])[0]) == ["1", "2"]
    assert list(find_layers(net, ["0.*", "2"])[0]) == ["1"]
    with pytest.raises(ValueError, match=r"no module '0.7'. Did you mean .*'0.0'"):
        find_layers(net, ["0.7"])
    with pytest.raises(TypeError, match="list of names"):
        find_layers(net, "0")


@pytest.mark.parametrize("padded", [False, True])
def test_a_transformer_in_eval_mode_runs_its_new_layers(padded: bool) -> None:
    """torch's fused path would read whole weights; the result is compared with the same matrices in plain layers."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    net = nn.TransformerEncoder(layer, 2).eval()
    plain = copy_model(net)
    names = [f"layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2)]
    replace_layers_(net, {name: lighter_layer(net.get_submodule(name), 1, 4, warm_start=True) for name in names})
    with torch.no_grad():
        for name in names:
            weight = net.get_submodule(name).weight
            assert isinstance(weight, torch.Tensor)
            plain.get_submodule(name).get_parameter("weight").copy_(weight)
    calls = []
    net.get_submodule("layers.0.linear1.up").register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(3, 5, 16)
    mask = torch.arange(5).expand(3, 5) >= torch.tensor([[5], [4], [2]]) if padded else None
    with torch.no_grad():
        ours, theirs = net(x, src_key_padding_mask=mask), plain(x, src_key_padding_mask=mask)
    kept = slice(None) if mask is None else ~mask
    torch.testing.assert_close(ours[kept], theirs[kept], atol=1e-5, rtol=1e-5)
    net.get_submodule("layers.0.linear1.up")._forward_hooks.clear()
    with torch.no_grad():  # hooks close the fused path too, so once more without
        again = net(x, src_key_padding_mask=mask)
    torch.testing.assert_close(again[kept], theirs[kept], atol=1e-5, rtol=1e-5)
    assert calls == [1]


def test_a_copy_has_no_gradients_and_shares_nothing() -> None:
    net = nn.Linear(4, 4)
    net(torch.ones(4)).sum().backward()
    twin = copy_model(net)
    assert all(p.grad is None for p in twin.parameters())
    assert all(p.grad is not None for p in net.parameters())
    assert twin.get_parameter("weight").data_ptr() != net.weight.data_ptr()


def test_what_cannot_be_copied_is_refused() -> None:
    class Held(nn.Module):
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("not mine to copy")

    with pytest.raises(ValueError, match=r"cannot be copied \(RuntimeError: not mine to copy\)"):
        copy_model(Held())
    with pytest.raises(ValueError, match=r"'weight' has no shape before the first forward"):
        copy_model(nn.LazyLinear(3))
    compiled = nn.Linear(2, 2)
    compiled.__dict__["_compiled_call_impl"] = compiled._call_impl  # as compile() leaves it
    with pytest.raises(TypeError, match="is compiled"):
        copy_model(compiled)
    with pytest.raises(TypeError, match=r"a torch\.nn\.Module, got int"):
        copy_model(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="wrapped in DataParallel"):
        copy_model(nn.DataParallel(nn.Linear(2, 2)))

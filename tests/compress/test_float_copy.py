"""The float copy computes what the model computes, in float32, and shares nothing with it."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_speedkit.compress import quantize_model
from lightning_speedkit.compress.float_copy import copy_module, fingerprint, float_copy, replace_module
from tests.compress.models import (
    ConvNet,
    Digits,
    digit_batches,
    digits,
    mlp,
    quiet_trainer,
    relative,
)


class TestFloatCopy:
    def test_shares_no_memory_and_leaves_the_trainer_behind(self) -> None:
        model = Digits(mlp())
        model.trainer = quiet_trainer()
        model.lock = threading.Lock()
        twin = float_copy(model)
        assert twin._trainer is None
        assert twin.lock is model.lock
        pointers = {p.data_ptr() for p in model.parameters()}
        assert pointers.isdisjoint(p.data_ptr() for p in twin.parameters())
        assert fingerprint(twin) == fingerprint(model)

    def test_a_data_set_on_the_module_is_not_copied(self) -> None:
        model = nn.Linear(1, 1)
        model.data = torch.utils.data.TensorDataset(torch.zeros(10))  # type: ignore[assignment]
        assert float_copy(model).data is model.data

    @pytest.mark.parametrize("change", ["weight", "buffer", "dtype"])
    def test_fingerprint_sees_every_change(self, change: str) -> None:
        model = nn.BatchNorm1d(3)
        before = fingerprint(model)
        assert before == fingerprint(model)
        if change == "weight":
            model.weight.data[1] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
        elif change == "buffer":
            model.num_batches_tracked.add_(1)
        else:
            model.double()
        assert fingerprint(model) != before


def test_pruned_and_parametrized_weights_are_quantized_as_they_act() -> None:
    pruned = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    nn.utils.prune.l1_unstructured(pruned[0], "weight", amount=0.5)
    nn.utils.parametrizations.weight_norm(pruned[2])
    x = torch.randn(8, 16)
    int8, details = quantize_model(pruned, [x])
    assert details.layers_quantized == ("0", "2")
    zero = pruned[0].weight == 0
    assert int(zero.sum()) == 128
    assert bool((int8[0].weight().int_repr()[zero] == 0).all())
    assert hasattr(pruned[0], "weight_mask")
    with torch.no_grad():
        assert relative(pruned(x), int8(x)) < 0.05


def test_compiled_modules_are_quantized_as_plain_ones() -> None:
    net = mlp()
    wrapped, in_place = torch.compile(mlp(), backend="eager"), mlp()
    in_place.compile(backend="eager")
    for model in (nn.Sequential(net), wrapped, nn.Sequential(torch.compile(mlp(), backend="eager")), in_place):
        int8, details = quantize_model(model, digit_batches(1))
        assert len(details.layers_quantized) == 2
        with torch.no_grad():
            assert relative(model(digits()[0][:9]), int8(digits()[0][:9])) < 0.05


def test_the_copy_is_float32_in_eval_mode_without_gradients() -> None:
    model = ConvNet().double().train()
    twin = float_copy(model)
    assert {p.dtype for p in twin.parameters()} == {torch.float32}
    assert not any(part.training for part in twin.modules())
    assert not any(p.requires_grad for p in twin.parameters())
    assert all(part.training for part in model.modules())
    assert all(p.requires_grad and p.dtype == torch.float64 for p in model.parameters())


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
@pytest.mark.parametrize(
    ("padding", "size", "dilation", "expected"),
    [("same", 3, 1, 1), ("same", 5, 2, 4), ("valid", 3, 1, 0), ("same", 2, 1, "same"), ("same", 2, 2, 1)],
)
def test_padding_becomes_the_numbers_it_stands_for(
    kind: type[nn.Module], padding: str, size: int, dilation: int, expected: Any
) -> None:
    dimensions = int(kind.__name__[4])
    layer = kind(2, 3, size, padding=padding, dilation=dilation)
    twin = float_copy(layer)
    assert twin.padding == (expected if isinstance(expected, str) else (expected,) * dimensions)
    assert layer.padding == padding
    x = torch.randn(2, 2, *[9] * dimensions)
    torch.testing.assert_close(twin(x), layer(x), rtol=0, atol=0)


def test_what_cannot_be_copied_is_shared_and_the_rest_is_not() -> None:
    class Stubborn:
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("there is only one of me")

    model = nn.Linear(2, 2)
    model.stubborn, model.notes = Stubborn(), ["mine"]
    model.history = model(torch.ones(1, 2))  # type: ignore[assignment]
    twin = copy_module(model)
    assert twin.stubborn is model.stubborn
    assert twin.notes == model.notes
    assert twin.notes is not model.notes
    assert twin.history.grad_fn is None
    torch.testing.assert_close(twin.history, model.history.detach(), rtol=0, atol=0)


def test_a_hook_of_the_user_stays() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    x = torch.randn(3, 2)
    torch.testing.assert_close(float_copy(model)(x), model(x), rtol=0, atol=0)


def test_removing_a_parametrization_leaves_the_original_its_own() -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    x = torch.randn(4, 3)
    expected = model(x)
    twin = float_copy(model)
    assert isinstance(twin.weight, nn.Parameter)
    assert nn.utils.parametrize.is_parametrized(model)
    torch.testing.assert_close(twin(x), expected)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)


def test_replacing_the_root_gives_the_new_module() -> None:
    new = nn.ReLU()
    assert replace_module(nn.Linear(1, 1), "", new) is new


def test_complex_weights_keep_their_imaginary_part_and_stay_shared() -> None:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filter = nn.Parameter(torch.randn(5, dtype=torch.complex128))
            self.same = self.filter
            self.register_buffer("phase", torch.tensor([1j], dtype=torch.complex64))
            self.scale = nn.Parameter(torch.ones(8, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.irfft(torch.fft.rfft(x) * self.filter * self.phase, n=8) * self.scale

    net, x = Spectral(), torch.randn(3, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of an imaginary part that it drops
        twin = float_copy(net)
    assert (twin.filter.dtype, twin.phase.dtype, twin.scale.dtype) == (torch.complex64, torch.complex64, torch.float32)
    assert twin.same is twin.filter
    assert isinstance(twin.filter, nn.Parameter)
    assert (twin.filter.requires_grad, net.filter.requires_grad, net.filter.dtype) == (False, True, torch.complex128)
    assert torch.allclose(twin(x), net(x.double()).float(), atol=1e-5)


def test_a_scripted_module_can_be_copied() -> None:
    net = torch.jit.script(nn.Sequential(nn.Linear(4, 2)))
    twin = float_copy(nn.Sequential(net, nn.Linear(2, 2)))
    assert not any(parameter.requires_grad for parameter in twin.parameters())
    assert all(parameter.requires_grad for parameter in net.parameters())

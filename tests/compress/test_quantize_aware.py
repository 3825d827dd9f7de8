"""Fake quantization against integer arithmetic by hand and torchao, and the callback in Trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn

from lightning_speedkit import AccumulationScheduler, ActivationCheckpointing, AverageWeights, CompileModel
from lightning_speedkit.compress.quantize import QuantizeOnFitEnd
from lightning_speedkit.compress.quantize_aware import FakeQuantization, QuantizationAwareTraining
from lightning_speedkit.compress.quantize_aware_numbers import WeightGrid
from tests.compress.models import ConvNet, Digits, digit_loader, mlp
from tests.conformance.models import FEATURES, classifier, loader, quiet_trainer
from tests.two_ranks import on_two_ranks

EXACT: dict[str, Any] = {"rtol": 0, "atol": 0}


def test_static_forward_equals_the_integer_arithmetic_by_hand() -> None:
    layer = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        # 3 bits: integers from -3 to 3, scales 1.0 and 0.5
        layer.weight.copy_(torch.tensor([[3.0, 1.4], [-1.5, 0.3]]))
    fake = FakeQuantization(layer, weight_bits=3, activation_bits=2)
    fake.switch_on()
    layer(torch.tensor([[0.0, 3.0]]))  # range 0 to 3: integers 0 to 3, scale 1
    fake.update()
    out = layer(torch.tensor([[1.4, 9.0]]))  # as integers 1 and 3, the end of the range
    by_hand = [1.0 * (3 * 1 + 1 * 3), 0.5 * (-3 * 1 + 1 * 3)]  # weights as integers: 3, 1 and -3, 1
    torch.testing.assert_close(out[0].detach(), torch.tensor(by_hand), **EXACT)
    fake.remove()
    torch.testing.assert_close(layer(torch.tensor([[1.0, 0.0]]))[0].detach(), torch.tensor([3.0, -1.5]), **EXACT)
    assert type(layer) is nn.Linear
    assert "_rounding" not in vars(layer)


def test_gradient_passes_inside_the_range_and_stops_outside() -> None:
    layer = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[3.0, 1.4]]))
    fake = FakeQuantization(layer, weight_bits=3, activation_bits=2)
    fake.switch_on()
    layer(torch.tensor([[0.0, 3.0]]))
    fake.update()
    x = torch.tensor([[1.4, 9.0]], requires_grad=True)
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    assert x.grad is not None
    assert layer.weight.grad.tolist() == [[1.0, 3.0]]  # the rounded inputs
    assert x.grad.tolist() == [[3.0, 0.0]]  # the rounded weight, and nothing for what was cut off


def test_int4_weights_are_those_of_torchao() -> None:
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 16))
    weight = net[0].weight.detach().clone()
    quantize_(net, IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)))
    other: Any = net[0].weight
    torch.testing.assert_close(WeightGrid(4, group=32, full=True)(weight), other.dequantize(), rtol=1e-6, atol=1e-7)


def test_folding_a_norm_into_a_rounded_weight_rounds_nothing_anew() -> None:
    torch.manual_seed(0)
    weight, factor = torch.randn(8, 3, 3, 3), torch.randn(8, 1, 1, 1)
    grid = WeightGrid(7)
    torch.testing.assert_close(grid(weight * factor), grid(weight) * factor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(4, 4, 3, padding=1, padding_mode="circular"), (2, 4, 8)),
        (nn.Conv2d(4, 8, 3, stride=2, groups=2), (2, 4, 9, 9)),
        (nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1), (2, 4, 5, 5)),
    ],
    ids=["circular", "grouped", "transposed"],
)
def test_a_convolution_computes_with_its_rounded_weight(layer: nn.Module, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape)
    twin = type(layer).__new__(type(layer))
    nn.Module.__init__(twin)
    twin.__dict__.update({k: v for k, v in vars(layer).items() if k not in ("_parameters", "_modules")})
    weight: Any = layer.weight
    axis = 1 if isinstance(layer, nn.ConvTranspose2d) else 0
    twin.weight, twin.bias = nn.Parameter(WeightGrid(4, axis=axis)(weight).detach()), layer.bias
    fake = FakeQuantization(layer, weight_bits=4)
    fake.switch_on()  # inputs are not rounded yet: there is no range
    torch.testing.assert_close(layer(x), twin(x), **EXACT)
    fake.switch_off()
    assert not torch.equal(layer(x), twin(x))


def test_attention_computes_with_all_its_rounded_weights() -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(32, 2, batch_first=True)
    twin = nn.MultiheadAttention(32, 2, batch_first=True)
    grid = WeightGrid(4, full=True, group=32)
    twin.load_state_dict({k: grid(v) if v.ndim == 2 else v for k, v in attention.state_dict().items()})
    x = torch.randn(2, 5, 32)
    fake = FakeQuantization(attention, "weight-only-int4")
    fake.switch_on()
    torch.testing.assert_close(attention(x, x, x)[0], twin(x, x, x)[0], **EXACT)
    assert fake.layers == ("", "out_proj")
    assert fake.skipped == {}
    assert list(attention.state_dict()) == list(twin.state_dict())


def test_an_encoder_in_eval_mode_is_rounded_too() -> None:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True).eval()
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        plain = encoder(x)
        fake = FakeQuantization(encoder, "weight-only-int8", weight_bits=3)
        fake.switch_on()
        rounded = encoder(x)
        fake.remove()
        again = encoder(x)
    assert (rounded - plain).abs().max() > 0.05
    torch.testing.assert_close(again, plain, **EXACT)


def test_what_is_not_rounded_is_named_with_the_reason() -> None:
    class Own(nn.Linear):
        pass

    net = nn.ModuleDict(
        {
            "own": Own(4, 4),
            "words": nn.Embedding(3, 4),
            "head": nn.Linear(4, 2),
            "late": nn.LazyLinear(2),
            "norm": nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
            "used": nn.Linear(4, 4),
        }
    )
    fake = FakeQuantization(net, skip=["he*"])
    assert fake.layers == ("used",)
    told = {name: reason for name, reason in fake.skipped.items() if "." not in name}
    assert "subclass" in told["own"]
    assert "Embedding" in told["words"]
    assert told["head"] == "named in skip"
    assert "run the network once" in told["late"]


def test_a_copy_is_plain() -> None:
    import copy
    import pickle

    net = nn.Sequential(nn.Linear(2, 2))
    fake = FakeQuantization(net)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert type(twin[0]) is nn.Linear
        assert "_rounding" not in vars(twin[0])
        torch.testing.assert_close(twin.state_dict(), net.state_dict())
    fake.remove()


def _fit(callbacks: list[Callback], max_epochs: int = 3, model: Any = None, **options: Any) -> Any:
    model = classifier() if model is None else model
    torch.manual_seed(3)
    trainer = quiet_trainer(callbacks, max_epochs=max_epochs, **options)
    trainer.fit(model, loader(), loader(), ckpt_path=options.pop("ckpt_path", None))
    return model


def _aware(**arguments: Any) -> QuantizationAwareTraining:
    return QuantizationAwareTraining(**{"start": 6, "freeze_ranges": 12, "weight_bits": 4, **arguments})


def test_a_start_beyond_the_fit_changes_no_bit_and_says_so() -> None:
    plain = _fit([])
    with pytest.warns(UserWarning, match="never started"):
        other = _fit([_aware(start=1000, freeze_ranges=1000)])
    torch.testing.assert_close(other.losses, plain.losses, **EXACT)
    torch.testing.assert_close(other.state_dict(), plain.state_dict(), **EXACT)


@pytest.mark.parametrize(
    ("epochs", "batches", "accumulated", "start"),
    [(1, 2, 1, 1), (1, 3, 1, 2), (1, 4, 1, 3), (1, 5, 1, 4), (2, 5, 1, 8), (1, 4, 2, 2)],
)
def test_a_share_leaves_the_last_step_at_the_least_to_round(
    epochs: int, batches: int, accumulated: int, start: int
) -> None:
    options = {"max_epochs": epochs, "limit_train_batches": batches, "accumulate_grad_batches": accumulated}
    plain, aware = _fit([], **options), _aware(start=0.8, freeze_ranges=0.9)
    other = _fit([aware], **options)
    same = [torch.equal(a, b) for a, b in zip(plain.losses, other.losses, strict=True)]
    assert len(same) == epochs * batches
    assert same[: start + 1] == [True] * start + [False]
    assert set(aware.ranges) == set(aware.layers)


def test_one_step_alone_stays_in_float_and_the_reason_is_said() -> None:
    with pytest.warns(UserWarning, match=r"start=0\.8 is a share .* needs a fit of 2 optimizer steps"):
        _fit([_aware(start=0.8, freeze_ranges=0.9)], max_epochs=1, limit_train_batches=1)


def test_losses_are_those_of_a_plain_run_until_the_start_and_ranges_stand_still_after_the_freeze() -> None:
    class Watch(Callback):
        ranges: list[Any] = []

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.ranges.append(dict(aware.ranges))

    plain, aware, watch = _fit([]), _aware(), Watch()
    watch.ranges = []
    other = _fit([aware, watch])
    assert [torch.equal(a, b) for a, b in zip(plain.losses, other.losses, strict=True)][:7] == [True] * 6 + [False]
    assert not any(watch.ranges[:6])
    assert set(watch.ranges[6]) == set(aware.layers) == {"blocks.0.linear", "blocks.1.linear", "head"}
    assert watch.ranges[10] != watch.ranges[11]
    assert watch.ranges[11] == watch.ranges[12] == watch.ranges[-1] == aware.ranges
    assert type(other.head) is nn.Linear


def test_training_equals_a_plain_loop_with_rounded_weights() -> None:
    model, twin = Digits(mlp(), lr=0.01), Digits(mlp(), lr=0.01)
    twin.load_state_dict(model.state_dict())
    data = digit_loader(0, 256)
    aware = QuantizationAwareTraining("weight-only-int4", start=0.0, freeze_ranges=1.0)
    quiet_trainer([aware], max_epochs=1).fit(model, data)
    grid = WeightGrid(4, group=32, full=True)
    optimizer = torch.optim.Adam(twin.parameters(), lr=0.01)
    first, last = twin.net[1], twin.net[3]
    for x, y in data:
        hidden = torch.relu(nn.functional.linear(x.flatten(1), grid(first.weight), first.bias))
        loss = nn.functional.cross_entropy(nn.functional.linear(hidden, grid(last.weight), last.bias), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), **EXACT)


@pytest.mark.parametrize("epochs", [1, 2], ids=["before-the-start", "after-the-start"])
def test_resume_reaches_the_weights_and_ranges_of_the_unbroken_run(epochs: int, tmp_path: Path) -> None:
    whole_aware, aware = _aware(start=8, freeze_ranges=20), _aware(start=8, freeze_ranges=20)
    whole = _fit([whole_aware], max_epochs=4)
    trainer = quiet_trainer([_aware(start=8, freeze_ranges=20)], max_epochs=epochs)
    broken = classifier()
    torch.manual_seed(3)
    trainer.fit(broken, loader(), loader())
    path, state = tmp_path / "middle.ckpt", torch.get_rng_state()
    trainer.save_checkpoint(path)
    assert list(torch.load(path, weights_only=True)["state_dict"]) == list(classifier().state_dict())
    model = classifier()
    torch.set_rng_state(state)
    quiet_trainer([aware], max_epochs=4).fit(model, loader(), loader(), ckpt_path=path)
    torch.testing.assert_close(model.state_dict(), whole.state_dict(), **EXACT)
    assert aware.ranges == whole_aware.ranges


def test_validation_is_in_float_unless_asked() -> None:
    class Asks(Callback):
        def __init__(self) -> None:
            self.outputs: list[bool] = []

        def on_validation_batch_end(self, trainer: Any, pl_module: LightningModule, *_: Any) -> None:
            weight: Any = pl_module.head.weight
            x = torch.eye(FEATURES)
            plain = nn.functional.linear(x, weight, pl_module.head.bias)  # type: ignore[arg-type]
            self.outputs.append(torch.equal(pl_module.head(x), plain))  # type: ignore[operator]

    for asked in (False, True):
        asks = Asks()
        _fit([_aware(in_validation=asked), asks], max_epochs=2)
        assert asks.outputs == [True] * 6 + [not asked] * 6


@pytest.mark.parametrize(
    "other",
    [
        lambda: AverageWeights(decay=0.9, start=2),
        lambda: EMAWeightAveraging(decay=0.9),
        lambda: AccumulationScheduler(2),
        lambda: ActivationCheckpointing(["Linear"]),
        lambda: ActivationCheckpointing(["Block"]),
        lambda: CompileModel(backend="eager", eager_steps=0),
    ],
    ids=["average", "lightning-ema", "accumulate", "checkpoint-layers", "checkpoint-blocks", "compile"],
)
def test_beside_another_callback_in_either_order(other: Any) -> None:
    runs = [_fit(order) for order in ([_aware(start=3), other()], [other(), _aware(start=3)])]
    torch.testing.assert_close(runs[0].state_dict(), runs[1].state_dict(), **EXACT)
    without = _fit([other()])
    assert torch.equal(without.losses[2], runs[0].losses[2])
    assert any(not torch.equal(a, b) for a, b in zip(without.losses, runs[0].losses, strict=True))
    assert {type(m).__mro__[0] for m in runs[0].modules()} == {type(m) for m in classifier().modules()}


@pytest.mark.parametrize("other", ["checkpoint-layers", "checkpoint-blocks", "compile"])
def test_recomputed_and_compiled_layers_train_as_plain_ones(other: str) -> None:
    beside: Callback = {
        "checkpoint-layers": lambda: ActivationCheckpointing(["Linear"]),
        "checkpoint-blocks": lambda: ActivationCheckpointing(["Block"]),
        "compile": lambda: CompileModel(backend="eager", eager_steps=0),
    }[other]()
    alone = _fit([_aware(start=3)])
    torch.testing.assert_close(_fit([_aware(start=3), beside]).losses, alone.losses, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("flip", [False, True], ids=["before", "after"])
def test_it_and_quantization_on_fit_end_work_in_one_trainer(flip: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    quantize = QuantizeOnFitEnd(backend="torch-ao-static", objective="size", folder=str(tmp_path))
    callbacks = [QuantizationAwareTraining(start=0.5), quantize]
    trainer = quiet_trainer(callbacks[::-1] if flip else callbacks, max_epochs=2)
    trainer.fit(Digits(ConvNet()), digit_loader(0, 512), digit_loader(1024, 1280))
    assert quantize.report is not None
    assert quantize.report.layers_quantized == ("net.conv1", "net.conv2", "net.head")
    assert quantize.report.metric_drop is not None
    assert quantize.report.metric_drop < 0.02


def _ranges_on_a_rank() -> tuple[dict[str, Tensor], Any]:
    aware = _aware()
    model = _fit([aware], strategy="ddp", devices=2, max_epochs=5)
    return {name: value.clone() for name, value in model.named_parameters()}, aware.ranges


def test_two_ranks_have_the_same_weights_and_ranges() -> None:
    (first, ranges), (second, others) = on_two_ranks(_ranges_on_a_rank)
    torch.testing.assert_close(first, second, **EXACT)
    assert ranges == others
    assert len(ranges) == 3


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"scheme": "int8"}, ValueError, "static-int8"),
        ({"start": 1.5}, ValueError, "start=1.5 is not allowed"),
        ({"start": "late"}, TypeError, "start must be"),
        ({"start": 0.9, "freeze_ranges": 0.5}, ValueError, "before start"),
        ({"unit": "batch"}, ValueError, "'step'"),
        ({"skip": "head"}, TypeError, r"\['head'\]"),
        ({"weight_bits": 9}, ValueError, "from 2 to 8"),
        ({"scheme": "weight-only-int4", "activation_bits": 8}, ValueError, "no effect"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        QuantizationAwareTraining(**arguments)


def test_a_share_of_a_fit_without_an_end_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="length is not known"):
        _fit([QuantizationAwareTraining()], max_epochs=-1)


def test_a_model_without_such_a_layer_is_told() -> None:
    with pytest.warns(UserWarning, match="finds no layer"):
        _fit([_aware(skip=["*"])])

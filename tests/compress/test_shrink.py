from __future__ import annotations

import copy
import json
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, WeightAveraging
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from lightning_speedkit.compress.quantize import QuantizeOnFitEnd
from lightning_speedkit.compress.shrink import StructuredPruning, load_shrunk, resize_to, shrink_model
from lightning_speedkit.errors import MissingExtraError, SpeedkitError
from tests.compress.models import ConvNet, Digits, digit_loader, digits, quiet_trainer
from tests.compress.shrink_models import Residual, Transformer, images, randomised
from tests.two_ranks import on_two_ranks


class Wide(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(64, width), nn.Linear(width, width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.second(torch.relu(self.first(x.flatten(1))))))


class WideDigits(Digits):
    def __init__(self, width: int = 32) -> None:
        super().__init__(Wide(width), lr=0.005)
        self.seen: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.seen.append(loss.detach())
        return loss


def _fit(model: Digits, *callbacks: Any, ckpt_path: Any = None, **arguments: Any) -> Trainer:
    trainer = quiet_trainer(callbacks=list(callbacks), **{"max_epochs": 3, **arguments})
    trainer.fit(model, digit_loader(0, 512), digit_loader(1024, 1280), ckpt_path=ckpt_path)
    return trainer


def _widths(model: Digits) -> list[tuple[int, ...]]:
    return [tuple(p.shape) for p in model.net.parameters() if p.ndim > 1]


HALF = [(16, 64), (16, 16), (10, 16)]


def test_a_missing_library_is_said_before_the_first_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_pruning", None)
    model = Digits(ConvNet())
    with pytest.raises(MissingExtraError, match=r"lightning-speedkit\[prune\]"):
        quiet_trainer(callbacks=[StructuredPruning(0.5, start_epoch=2)], max_epochs=3).fit(model, digit_loader(0, 64))
    assert model.trainer.global_step == 0


def test_a_model_is_shrunk_in_place_and_its_optimizer_goes_on_with_the_same_moments() -> None:
    model = randomised(Wide(8)).train()
    optimizer = torch.optim.Adam(
        [{"params": model.first.parameters(), "lr": 0.1}, {"params": model.second.parameters()}]
    )
    model(images()).square().mean().backward()
    optimizer.step()
    before = dict(model.named_parameters())
    values = copy.deepcopy(model.state_dict())
    moments = {name: copy.deepcopy(optimizer.state[p]) for name, p in before.items() if p in optimizer.state}
    gradient = model.first.weight.grad.clone()
    plan = shrink_model(model, images(), 0.5, optimizers=[optimizer])
    assert plan.layers == {"first": (8, 4), "second": (8, 4)}
    assert model.training
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    rows, inner = plan.cuts["first.weight"][0], plan.cuts["second.weight"][0]
    torch.testing.assert_close(model.first.weight, values["first.weight"][rows], rtol=0, atol=0)
    torch.testing.assert_close(model.second.weight, values["second.weight"][inner][:, rows], rtol=0, atol=0)
    torch.testing.assert_close(model.head.weight, values["head.weight"][:, inner], rtol=0, atol=0)
    torch.testing.assert_close(model.first.weight.grad, gradient[rows], rtol=0, atol=0)
    state = optimizer.state[model.second.weight]
    for key in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(state[key], moments["second.weight"][key][inner][:, rows], rtol=0, atol=0)
    assert state["step"] == 1
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.001]
    old = model.second.weight.detach().clone()
    optimizer.zero_grad()
    model(images()).square().mean().backward()
    optimizer.step()
    assert not torch.equal(model.second.weight, old)


def test_the_rest_of_the_run_is_that_of_a_plain_loop_which_cuts_by_hand() -> None:
    torch.manual_seed(0)
    model = WideDigits()
    twin = copy.deepcopy(model.net)
    callback = StructuredPruning(0.5)
    _fit(model, callback, max_epochs=2)
    optimizer = torch.optim.Adam(twin.parameters(), lr=0.005)

    def epoch() -> None:
        for x, y in digit_loader(0, 512):
            optimizer.zero_grad()
            nn.functional.cross_entropy(twin(x), y).backward()
            optimizer.step()

    epoch()
    first, second, head = twin.first, twin.second, twin.head

    def share(*votes: Tensor) -> list[int]:  # each tensor's squared norms over their mean, the better half
        score = sum(vote / vote.mean() for vote in votes)
        return sorted(score.argsort(descending=True)[:16].tolist())

    def squares(weight: Tensor, dim: int) -> Tensor:
        return weight.detach().double().square().sum(dim)

    rows = share(squares(first.weight, 1), squares(second.weight, 0))
    inner = share(squares(second.weight, 1), squares(head.weight, 0))
    small = Wide(16)
    cuts = {
        "first.weight": lambda t: t[rows],
        "first.bias": lambda t: t[rows],
        "second.weight": lambda t: t[inner][:, rows],
        "second.bias": lambda t: t[inner],
        "head.weight": lambda t: t[:, inner],
        "head.bias": lambda t: t,
    }
    small.load_state_dict({name: cuts[name](p) for name, p in twin.state_dict().items()})
    new = torch.optim.Adam(small.parameters(), lr=0.005)
    for (name, old), parameter in zip(twin.named_parameters(), small.parameters(), strict=True):
        state = optimizer.state[old]
        new.state[parameter] = {
            "step": state["step"],
            "exp_avg": cuts[name](state["exp_avg"]),
            "exp_avg_sq": cuts[name](state["exp_avg_sq"]),
        }
    twin, optimizer = small, new
    epoch()
    assert _widths(model) == HALF
    torch.testing.assert_close(dict(model.net.state_dict()), dict(small.state_dict()), rtol=0, atol=0)


def test_report_holds_numbers_worked_out_by_hand(tmp_path: Path) -> None:
    callback = StructuredPruning(0.5)
    trainer = _fit(WideDigits(), callback, logger=CSVLogger(tmp_path), max_epochs=2)
    report = callback.report
    assert report is not None
    assert report.layers == {"net.first": [32, 16], "net.second": [32, 16]}
    assert (report.parameters_before, report.parameters_after) == (65 * 32 + 33 * 32 + 330, 65 * 16 + 17 * 16 + 170)
    assert report.batch_size == 64
    assert report.flops_before == 64 * 2 * (64 * 32 + 32 * 32 + 320)
    assert report.flops_after == 64 * 2 * (64 * 16 + 16 * 16 + 160)
    assert report.bytes_after < report.bytes_before
    assert min(report.seconds_before_batch, report.seconds_after_one) > 0
    assert report.skipped == {"net.head": "its channels are an output of the network or the input of a recurrent layer"}
    written = json.loads((Path(trainer.default_root_dir) / "shrunk" / "report.json").read_text())
    assert (written["schema"], written["parameters_after"]) == (1, report.parameters_after)
    assert "shrink/flops_after" in Path(trainer.logger.log_dir, "metrics.csv").read_text()


def test_steps_share_the_ratio_of_the_width_at_the_start() -> None:
    class Watch(WideDigits):
        def on_train_epoch_end(self) -> None:
            widths.append(self.net.first.out_features)

    widths: list[int] = []
    callback = StructuredPruning(0.75, steps=3, start_epoch=1, every_epochs=2)
    _fit(Watch(), callback, max_epochs=7)
    assert widths == [32, 24, 24, 16, 16, 8, 8]
    assert callback.report is not None
    assert callback.report.layers["net.first"] == [32, 8]
    assert callback.report.steps_done == 3


def test_a_run_broken_off_after_the_cut_ends_as_the_unbroken_one(tmp_path: Path) -> None:
    def callback() -> StructuredPruning:
        return StructuredPruning(0.5, steps=2, max_metric_drop=10.0, monitor="val_acc")

    def model() -> WideDigits:
        torch.manual_seed(0)
        return WideDigits()

    whole = model()
    _fit(whole, callback(), max_epochs=4)
    broken = model()
    trainer = _fit(broken, callback(), max_epochs=2)
    assert _widths(broken)[0] == (24, 64)
    trainer.save_checkpoint(tmp_path / "middle.ckpt")
    torch.load(tmp_path / "middle.ckpt", weights_only=True)
    resumed = model()
    _fit(resumed, callback(), max_epochs=4, ckpt_path=tmp_path / "middle.ckpt")
    assert _widths(resumed) == HALF
    torch.testing.assert_close(dict(resumed.state_dict()), dict(whole.state_dict()), rtol=0, atol=0)


def test_checkpoints_from_before_and_after_load_everywhere(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", save_top_k=-1, save_weights_only=True)
    model, callback = WideDigits(), StructuredPruning(0.5)
    trainer = _fit(model, callback, checkpoint, enable_checkpointing=True, max_epochs=2)
    trainer.save_checkpoint(tmp_path / "whole.ckpt")
    loader, x = digit_loader(1408, 1792), digits()[0][:20]
    expected = model.eval()(x)
    early, late = tmp_path / "epoch=0.ckpt", tmp_path / "epoch=1.ckpt"
    trainer.test(model, loader, ckpt_path=early, verbose=False)
    assert _widths(model)[0] == (32, 64)  # the size of the checkpoint
    trainer.test(model, loader, ckpt_path="best", verbose=False)
    for path in (late, tmp_path / "whole.ckpt"):
        trainer.test(model, loader, ckpt_path=path, verbose=False)
        assert _widths(model) == HALF
        fresh = WideDigits()
        trainer.test(fresh, loader, ckpt_path=path, verbose=False)
        torch.testing.assert_close(fresh.eval()(x), expected)
        loaded = load_shrunk(WideDigits, path)
        assert type(loaded) is WideDigits
        torch.testing.assert_close(loaded.eval()(x), expected)
        with pytest.raises(RuntimeError, match="size mismatch"):
            WideDigits.load_from_checkpoint(path)

    class Resizing(WideDigits):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            resize_to(self, checkpoint)

    loaded = Resizing.load_from_checkpoint(tmp_path / "whole.ckpt")
    torch.testing.assert_close(loaded.eval()(x), expected)
    plain = quiet_trainer(max_epochs=3)  # and goes on without the callback
    plain.fit(Resizing(), digit_loader(0, 128), digit_loader(1024, 1088), ckpt_path=tmp_path / "whole.ckpt")
    plain.save_checkpoint(tmp_path / "again.ckpt")
    assert _widths(load_shrunk(WideDigits, tmp_path / "again.ckpt")) == HALF
    with pytest.raises(RuntimeError, match="size mismatch"):
        quiet_trainer(callbacks=[StructuredPruning()]).test(WideDigits(48), loader, ckpt_path=early, verbose=False)


class _Falls(WideDigits):
    """Its metric is perfect until it is cut."""

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_acc", 1.0 if self.net.first.out_features == 32 else 0.5)


def test_a_step_that_costs_too_much_is_taken_back_exactly() -> None:
    class Keeps(_Falls):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:  # the step follows at the first batch
                optimizer = self.optimizers().optimizer
                kept.update(copy.deepcopy({"model": self.state_dict(), "optimizer": optimizer.state_dict()["state"]}))

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            widths.append(self.net.first.out_features)
            if self.current_epoch == 2 and batch_idx == 0:
                optimizer = self.optimizers().optimizer
                restored.update(
                    copy.deepcopy({"model": self.state_dict(), "optimizer": optimizer.state_dict()["state"]})
                )

    kept: dict[str, Any] = {}
    restored: dict[str, Any] = {}
    widths: list[int] = []
    callback = StructuredPruning(0.5, steps=3, max_metric_drop=0.1, monitor="val_acc")
    model = Keeps()
    _fit(model, callback, max_epochs=4)
    assert widths == [32] * 8 + [27] * 8 + [32] * 16
    torch.testing.assert_close(restored, kept, rtol=0, atol=0)
    report = callback.report
    assert report is not None
    assert report.undone
    assert (report.metric_before, report.metric_after, report.metric_drop) == (1.0, 0.5, 0.5)
    assert report.layers == {}
    assert "a drop of 0.5, over max_metric_drop=0.1" in report.reason
    assert not set(vars(model)) & {"on_save_checkpoint", "on_load_checkpoint", "_speedkit_shrunk"}


def test_the_last_step_is_judged_at_the_end_and_a_good_one_kept() -> None:
    callback = StructuredPruning(0.5, max_metric_drop=0.1)
    model = _Falls()
    stopping = EarlyStopping("val_acc", mode="max", patience=9)
    _fit(model, callback, stopping, max_epochs=2)
    assert _widths(model)[0] == (32, 64)
    assert callback.report is not None
    assert callback.report.undone
    model, kept = WideDigits(), StructuredPruning(0.5, max_metric_drop=0.2, monitor="val_acc")
    _fit(
        model,
        kept,
        max_epochs=6,
    )
    assert _widths(model) == HALF
    assert kept.report is not None
    assert not kept.report.undone
    assert kept.report.metric_drop == pytest.approx(kept.report.metric_before - kept.report.metric_after)


def test_prune_then_train_then_quantize_is_one_fit() -> None:
    torch.manual_seed(0)
    model = Digits(ConvNet())
    shrink, quantize = StructuredPruning(0.5), QuantizeOnFitEnd(max_metric_drop=1.0)
    _fit(model, shrink, quantize, max_epochs=3)
    assert model.net.conv1.out_channels == 8
    assert quantize.quantized_model is not None
    with torch.no_grad():
        x = digits()[0][1408:1472]
        agree = (quantize.quantized_model(x).argmax(1) == model.eval()(x).argmax(1)).float().mean()
    assert float(agree) > 0.9


def _fit_on_a_rank(gated: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = (_Falls if gated else WideDigits)()
    callback = StructuredPruning(0.5, monitor="val_acc", max_metric_drop=0.1) if gated else StructuredPruning(0.5)
    trainer = _fit(model, callback, strategy="ddp", devices=2, max_epochs=3)
    return {
        "world": trainer.world_size,
        "widths": _widths(model),
        "weights": {name: p.detach().clone() for name, p in model.named_parameters()},
        "report": callback.report,
        "loss": torch.stack(model.seen),
    }


@pytest.mark.parametrize("gated", [False, True])
def test_two_ranks_cut_alike_and_go_on_averaging_gradients(gated: bool) -> None:
    one, other = on_two_ranks(_fit_on_a_rank, gated)
    assert one["world"] == 2
    assert one["widths"] == other["widths"]
    assert one["widths"][0] == ((32, 64) if gated else (16, 64))
    torch.testing.assert_close(one["weights"], other["weights"], rtol=0, atol=0)
    assert not torch.equal(one["loss"], other["loss"])  # they saw other samples
    assert one["report"] == other["report"]


def test_the_global_random_state_is_not_touched() -> None:
    states = []
    for callbacks in ([], [StructuredPruning(0.5)]):
        torch.manual_seed(3)
        _fit(WideDigits(), *callbacks, max_epochs=2)
        states.append(torch.get_rng_state())
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)


def test_taylor_goes_by_the_gradients_of_the_last_batch_and_needs_some() -> None:
    model = WideDigits()
    _fit(model, StructuredPruning(0.5, criterion="taylor"), max_epochs=2)
    assert _widths(model) == HALF
    with pytest.raises(MisconfigurationException, match="needs gradients, and no parameter has one"):
        shrink_model(Wide(), images(), criterion="taylor")


def test_heads_and_units_of_a_transformer_go_during_the_fit() -> None:
    model = Digits(Transformer())
    callback = StructuredPruning(0.5, head_ratio=0.5)
    _fit(model, callback, max_epochs=2)
    assert callback.report is not None
    assert callback.report.layers == {"net.attention": [4, 2], "net.up": [32, 16]}
    assert (model.net.attention.num_heads, model.net.attention.qkv.out_features) == (2, 24)
    assert not callback.report.skipped.keys() & {*callback.report.layers, "net.attention.qkv"}
    fresh = Digits(Transformer())
    resize_to(fresh, model.state_dict())
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(fresh.eval()(images()), model.eval()(images()))


def test_what_was_cut_in_any_step_is_not_said_to_be_skipped() -> None:
    callback = StructuredPruning(0.5, head_ratio=0.25, steps=3)  # of 4 heads one goes, in the last step
    _fit(Digits(Transformer()), callback, max_epochs=4)
    assert callback.report is not None
    assert callback.report.layers == {"net.attention": [4, 3], "net.up": [32, 16]}
    assert not callback.report.skipped.keys() & {*callback.report.layers, "net.attention.qkv"}
    again = StructuredPruning(0.5, head_ratio=0.5, steps=2)  # two go, in the first step and in the second
    _fit(Digits(Transformer()), again, max_epochs=3)
    assert again.report is not None
    assert again.report.layers["net.attention"] == [4, 2]
    assert "net.attention.qkv" not in again.report.skipped


@pytest.mark.parametrize(("arguments", "count"), [({}, 1), ({"max_metric_drop": 1.0}, 0), ({"ratio": 0.0}, 0)])
def test_a_monitor_that_judges_nothing_is_told_once(arguments: dict[str, Any], count: int) -> None:
    callback = StructuredPruning(**{"ratio": 0.5, "monitor": "val_acc", **arguments})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _fit(WideDigits(), callback, max_epochs=2)
    told = [str(one.message) for one in caught if "has no effect without max_metric_drop" in str(one.message)]
    assert len(told) == count
    assert all("StructuredPruning(monitor='val_acc')" in one for one in told)


def test_nothing_removable_is_said_with_the_reasons() -> None:
    callback = StructuredPruning(0.5)
    with pytest.warns(
        UserWarning,
        match=r"Nothing was removed: net.1: its channels are an output of the network",
    ):
        _fit(Digits(nn.Sequential(nn.Flatten(), nn.Linear(64, 10))), callback, max_epochs=2)
    assert callback.report is not None
    assert callback.report.layers == {}


def test_steps_after_the_last_epoch_are_named() -> None:
    with pytest.warns(
        UserWarning, match=r"1 of 2 steps after the last epoch \(at the start of epoch 2, and max_epochs=2"
    ):
        _fit(WideDigits(), StructuredPruning(0.5, steps=2), max_epochs=2)


def test_a_copy_of_weights_beside_it_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="WeightAveraging keeps copies of tensors in their old shapes"):
        _fit(WideDigits(), StructuredPruning(0.5), WeightAveraging())


def test_without_validation_a_step_stays_unjudged_with_a_warning() -> None:
    callback = StructuredPruning(0.5, max_metric_drop=0.1, monitor="val_acc", start_epoch=2)
    model = _Falls()
    with pytest.warns(UserWarning, match="kept its last step unjudged: no validation has run since"):
        _fit(model, callback, max_epochs=3, check_val_every_n_epoch=2)
    assert _widths(model) == HALF
    told = r"'val_ac' before the step, which no validation has logged so far.* Did you mean 'val_acc'"
    with pytest.raises(MisconfigurationException, match=told):
        _fit(WideDigits(), StructuredPruning(0.5, max_metric_drop=0.1, monitor="val_ac"), max_epochs=2)


def test_arguments_are_copied_and_round_numbers_kept() -> None:
    skip = ["first"]
    callback = StructuredPruning(skip=skip)
    skip.append("second")
    assert callback.skip == ["first"]
    model = Wide(30)
    plan = shrink_model(model, images(), 0.5, skip=["first"], round_to=8)
    assert plan.layers == {"second": (30, math.ceil(15 / 8) * 8)}
    assert plan.skipped["first"] == "named in skip"


def test_only_the_forward_of_the_example_is_used_and_left_unchanged() -> None:
    class Writes(Wide):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            x.mul_(scale)
            return super().forward(x)

    x = images()
    kept = x.clone()
    for example in (x, (x, 2.0), {"x": x, "scale": 0.5}):
        model = Writes()
        model.first.weight.requires_grad_(False)
        shrink_model(model, example, 0.5)
        assert model.first.out_features == 16
        assert not model.first.weight.requires_grad
        assert model.second.weight.requires_grad
    torch.testing.assert_close(x, kept, rtol=0, atol=0)


def test_a_second_shrink_counts_from_the_first_width() -> None:
    model = randomised(Residual())
    shrink_model(model, images(), 0.25)
    assert model.inner.out_channels == 9
    shrink_model(model, images(), 0.5)
    assert model.inner.out_channels == 6
    assert shrink_model(model, images(), 0.5).layers == {}


def test_a_misspelt_name_in_skip_is_an_error_before_anything_is_cut() -> None:
    with pytest.raises(ValueError, match=r"skip='frist' matches no module.*Did you mean 'first'"):
        shrink_model(Wide(), images(), skip=["frist"])
    with pytest.raises(ValueError, match=r"skip='first' matches no module.*Did you mean 'net.first'"):
        _fit(WideDigits(), StructuredPruning(skip=["first"]), max_epochs=1)


def test_a_report_that_cannot_be_written_does_not_end_the_run_with_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    callback, model = StructuredPruning(0.5, folder=str(tmp_path / "file" / "folder")), WideDigits()
    with pytest.warns(UserWarning, match="could not write its report to .*Not a directory"):
        _fit(model, callback, max_epochs=2)
    assert _widths(model) == HALF
    assert callback.report is not None
    second = StructuredPruning(0.5)
    with pytest.warns(UserWarning, match="Nothing was removed: an earlier fit has removed as much"):
        _fit(model, second, max_epochs=2)


def test_a_network_that_cannot_be_called_alone_says_what_to_do() -> None:
    class Alone(WideDigits):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            assert self.trainer.training
            return super().training_step(batch, batch_idx)

        def forward(self, x: Tensor) -> Tensor:
            assert self.trainer.training
            return super().forward(x)

        validation_step = None  # type: ignore[assignment]

    with pytest.raises(SpeedkitError, match=r"cannot call the network by itself.*use shrink_model.. before the fit"):
        quiet_trainer(callbacks=[StructuredPruning(0.5)], max_epochs=2).fit(Alone(), digit_loader(0, 128))

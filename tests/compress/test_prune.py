"""The callback in real runs, against plain loops, closed formulas and runs without it."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, ModelPruning, StochasticWeightAveraging
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn

from lightning_speedkit import ActivationCheckpointing, AverageWeights, BatchSizeSearch, NonFiniteGuard
from lightning_speedkit.compress import prune as prune_module
from lightning_speedkit.compress import prune_semi_structured
from lightning_speedkit.compress.prune import Pruning, prune_weights
from lightning_speedkit.compress.prune_arguments import refuse_pruning
from tests.conformance.models import CLASSES, FEATURES, Classifier, classifier, loader, quiet_trainer
from tests.two_ranks import on_two_ranks

WEIGHTS = ["blocks.0.linear.weight", "blocks.1.linear.weight", "head.weight"]
TOTAL = 2 * FEATURES**2 + FEATURES * CLASSES  # 560
STEPS = 6  # of an epoch
SETTINGS = {"start": 3, "end": 15, "every": 2}


def _fit(
    callbacks: list[Callback], model: LightningModule | None = None, ckpt_path: Path | None = None, **arguments: Any
) -> tuple[Any, Trainer]:
    model = model or classifier()
    trainer = quiet_trainer(callbacks, **{"max_epochs": 4, **arguments})
    torch.manual_seed(3)
    trainer.fit(model, loader(), loader(), ckpt_path=ckpt_path)
    return model, trainer


def _zeros(module: nn.Module) -> int:
    return sum(int((module.get_parameter(name) == 0).sum()) for name in WEIGHTS)


def _equal(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


class _Watch(Callback):
    def __init__(self) -> None:
        self.zeros: list[int] = []

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.zeros.append(_zeros(pl_module))


class _Still(Classifier):
    """Draws no random number and has no state, so that a loop of one's own can do the same."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.dropout = nn.Identity()
            block.norm = nn.Identity()


def _reference(model: nn.Module, sparsities: dict[int, float], clip: float) -> nn.Module:
    """Masks multiplied into the weights in the forward pass, whose gradients autograd then has, and a plain sort."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    masks = {name: torch.ones_like(model.get_parameter(name)) for name in WEIGHTS}
    step = 0
    for _ in range(4):
        for x, y in loader():
            weights = {name: model.get_parameter(name) * mask for name, mask in masks.items()}
            loss = nn.functional.cross_entropy(torch.func.functional_call(model, weights, (x,)), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            step += 1
            if step in sparsities:
                ranked = sorted(
                    ((model.get_parameter(name) * masks[name]).abs().flatten()[i].item(), WEIGHTS.index(name), i)
                    for name in WEIGHTS
                    for i in range(masks[name].numel())
                )
                for _, place, i in ranked[: round(sparsities[step] * TOTAL)]:
                    masks[WEIGHTS[place]].view(-1)[i] = 0
    for name, mask in masks.items():
        model.get_parameter(name).data.mul_(mask)
    return model


def test_trains_like_a_loop_that_multiplies_masks_in() -> None:
    torch.manual_seed(1)
    start = _Still()
    sparsities = {step: 0.7 - 0.7 * (1 - (step - 3) / 12) ** 3 for step in (5, 7, 9, 11, 13, 15)}
    expected = _reference(copy.deepcopy(start), sparsities, clip=0.5)
    model, _ = _fit([Pruning(0.7, **SETTINGS)], start, gradient_clip_val=0.5)
    assert _zeros(model) == 392
    torch.testing.assert_close(dict(model.named_parameters()), dict(expected.named_parameters()))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_sparsity_follows_the_schedule_to_the_element_and_is_held(accumulate: int) -> None:
    watch = _Watch()
    pruning = Pruning(0.8, start=1, end=6, every=2)
    model, trainer = _fit([pruning, watch], accumulate_grad_batches=accumulate)

    def at(step: int) -> int:
        return round(TOTAL * (0.8 - 0.8 * (1 - (step - 1) / 5) ** 3))

    by_hand = [0, 0, 0, at(3), at(3), at(5), 448] + [448] * (trainer.global_step - 7)
    assert watch.zeros == by_hand
    assert _zeros(model) == 448
    assert pruning.masks is not None
    assert pruning.masks.sparsity() == 0.8


def test_each_layer_alike() -> None:
    model, _ = _fit([Pruning(0.72, scope="layer", **SETTINGS)])
    counts = [int((model.get_parameter(name) == 0).sum()) for name in WEIGHTS]
    assert counts == [184, 184, 35]  # of 184.32 and 34.56
    assert all((model.get_parameter(name) != 0).all() for name in ("head.bias", "blocks.0.norm.weight"))


def test_shares_of_the_run() -> None:
    watch = _Watch()
    _fit([Pruning(0.5, start=0.25, end=0.5), watch])  # of 24 steps
    assert watch.zeros[6] == 0
    assert watch.zeros[7] > 0  # after step 7
    assert watch.zeros[10] < watch.zeros[12] == 280


@pytest.mark.parametrize(
    "settings",
    [{}, {"criterion": "movement"}, {"regrow": 0.3}, {"scope": "layer", "criterion": "movement", "regrow": 0.3}],
    ids=str,
)
def test_resumed_in_the_middle_of_the_schedule(settings: dict[str, Any], tmp_path: Path) -> None:
    def pruning() -> Pruning:
        return Pruning(0.8, **SETTINGS, **settings)

    whole, other = pruning(), pruning()
    expected, _ = _fit([whole])
    _, trainer = _fit([pruning()], max_epochs=2)
    path = tmp_path / "middle.ckpt"
    trainer.save_checkpoint(path)
    random_state = torch.get_rng_state()
    saved = torch.load(path, weights_only=True)
    assert 0 < _zeros_in(saved["state_dict"]) < 448
    model, resumed = classifier(), quiet_trainer([other], max_epochs=4)
    torch.set_rng_state(random_state)
    resumed.fit(model, loader(), loader(), ckpt_path=path)
    _equal(model.state_dict(), expected.state_dict())
    assert whole.masks is not None
    assert other.masks is not None
    _equal(other.masks.pruned, whole.masks.pruned)
    assert _zeros(model) == 448


def test_resumed_after_the_end_holds_the_sparsity(tmp_path: Path) -> None:
    _, trainer = _fit([Pruning(0.75, start=0, end=6)], max_epochs=2)
    path = tmp_path / "end.ckpt"
    trainer.save_checkpoint(path)
    watch = _Watch()
    model, _ = _fit([Pruning(0.75, start=0, end=6), watch], ckpt_path=path)
    assert set(watch.zeros) == {420}
    assert _zeros(model) == 420
    more, _ = _fit([Pruning(0.9, start=0, end=6)], ckpt_path=path)
    assert _zeros(more) == 504
    with pytest.raises(ValueError, match=r"has a sparsity of 0.750 already, and 0.5 is below it"):
        _fit([Pruning(0.5, start=0, end=6)], ckpt_path=path)


def test_a_second_fit_goes_on_from_the_zeros() -> None:
    model, _ = _fit([Pruning(0.5, **SETTINGS)])
    watch = _Watch()
    _fit([Pruning(0.8, **SETTINGS), watch], model)
    assert watch.zeros[0] == 280
    assert _zeros(model) == 448


def _zeros_in(state: dict[str, Tensor]) -> int:
    return sum(int((state[name] == 0).sum()) for name in WEIGHTS)


def _averages() -> list[Any]:
    return [
        lambda: AverageWeights(decay=0.8),
        lambda: AverageWeights("swa", unit="epoch", start=0.5),
        lambda: EMAWeightAveraging(decay=0.8),
        lambda: StochasticWeightAveraging(0.01, swa_epoch_start=2, annealing_epochs=1),
    ]


@pytest.mark.parametrize("average", _averages(), ids=["ema", "swa", "Lightning's ema", "Lightning's swa"])
@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
def test_averages_are_as_sparse_as_the_weights(average: Any, first: bool, tmp_path: Path) -> None:
    class Validated(Classifier):
        zeros: list[int] = []

        def on_validation_epoch_start(self) -> None:
            self.zeros.append(_zeros(self))

    torch.manual_seed(1)
    model, pruning = Validated(), Pruning(0.8, **SETTINGS)
    callbacks = [pruning, average()] if first else [average(), pruning]
    store = ModelCheckpoint(dirpath=tmp_path, save_top_k=-1, filename="{epoch}")
    Validated.zeros = []
    _, trainer = _fit([*callbacks, store], model, enable_checkpointing=True)
    assert _zeros(model) == 448
    assert Validated.zeros[-1] == 448
    state = torch.load(store.best_model_path, weights_only=True)["state_dict"]
    assert _zeros_in(state) == 448
    assert pruning.masks is not None
    assert all((state[name][~pruning.masks.pruned[name]] != 0).all() for name in WEIGHTS)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    assert _zeros_in(torch.load(tmp_path / "after.ckpt", weights_only=True)["state_dict"]) == 448
    reloaded = classifier()
    reloaded.load_state_dict(state)  # the keys are those of the plain module


def test_average_is_that_of_the_run_with_zeros_where_masks_are() -> None:
    class Recorded(Callback):
        def __init__(self) -> None:
            self.weights: list[dict[str, Tensor]] = []

        def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            self.weights.append({name: pl_module.get_parameter(name).detach().clone() for name in WEIGHTS})

    plain, recorded = Pruning(0.8, **SETTINGS), Recorded()
    last, _ = _fit([plain, recorded])
    averaged, _ = _fit([Pruning(0.8, **SETTINGS), AverageWeights("swa", start=18)])
    assert plain.masks is not None
    seen = [*recorded.weights[19:], {name: last.get_parameter(name).detach() for name in WEIGHTS}]
    for name in WEIGHTS:  # the masks do not change any more
        mean = torch.stack([weights[name] for weights in seen]).mean(0)
        torch.testing.assert_close(averaged.get_parameter(name).detach(), mean)


def test_resumed_beside_an_average(tmp_path: Path) -> None:
    def callbacks() -> list[Callback]:
        return [Pruning(0.8, **SETTINGS), AverageWeights(decay=0.8)]

    expected, _ = _fit(callbacks())
    _, trainer = _fit(callbacks(), max_epochs=2)
    trainer.save_checkpoint(tmp_path / "middle.ckpt")
    random_state = torch.get_rng_state()
    model = classifier()
    resumed = quiet_trainer(callbacks(), max_epochs=4)
    torch.set_rng_state(random_state)
    resumed.fit(model, loader(), loader(), ckpt_path=tmp_path / "middle.ckpt")
    _equal(model.state_dict(), expected.state_dict())


def _masks_on_a_rank(settings: dict[str, Any], *beside: Callback) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    pruning = Pruning(0.8, **SETTINGS, **settings)
    model, trainer = _fit([pruning, *beside], strategy="ddp", devices=2, max_epochs=6)
    assert trainer.world_size == 2
    assert pruning.masks is not None
    return pruning.masks.pruned, {name: model.get_parameter(name).detach() for name in WEIGHTS}


def _both_on_a_rank() -> list[Any]:
    return [
        _masks_on_a_rank({}),
        _masks_on_a_rank({"criterion": "movement", "regrow": 0.2}),
        _masks_on_a_rank({}, EMAWeightAveraging(decay=0.5)),
    ]


def test_two_ranks_have_the_same_masks() -> None:
    first, second = on_two_ranks(_both_on_a_rank)
    for (masks, weights), (other_masks, other_weights) in zip(first, second, strict=True):
        _equal(masks, other_masks)
        _equal(weights, other_weights)
        assert sum(int(marked.sum()) for marked in masks.values()) == 448
        assert all(torch.equal(weights[name] == 0, marked) for name, marked in masks.items())


def test_beside_what_runs_the_model_in_another_way() -> None:
    expected, _ = _fit([Pruning(0.8, **SETTINGS)])
    for callbacks in (
        [ActivationCheckpointing(["Block"])],
        [BatchSizeSearch(start=4, limit=4)],
        [NonFiniteGuard()],
    ):
        model, _ = _fit([Pruning(0.8, **SETTINGS), *callbacks])
        _equal(model.state_dict(), expected.state_dict())
    compiled = classifier()
    compiled.blocks = torch.compile(compiled.blocks, backend="eager")  # type: ignore[assignment]
    pruning = Pruning(0.8, **SETTINGS)
    _fit([pruning], compiled)
    assert pruning.masks is not None
    assert list(pruning.masks.weights) == WEIGHTS
    _equal([p.detach() for p in compiled.parameters()], [p.detach() for p in expected.parameters()])


class _Two(LightningModule):
    """Two networks with an optimizer each, stepped by hand, one of them every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.one, self.two = nn.Linear(FEATURES, 5), nn.Linear(FEATURES, 5)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for index, net in enumerate((self.one, self.two)):
            if index and batch_idx % 2:
                continue
            optimizer = self.optimizers()[index]  # type: ignore[index]
            optimizer.zero_grad()
            self.manual_backward(net(batch[0]).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(net.parameters(), lr=0.01) for net in (self.one, self.two)]


@pytest.mark.parametrize("criterion", ["magnitude", "movement"])
def test_several_optimizers_stepped_by_hand(criterion: str) -> None:
    model, pruning = _Two(), Pruning(0.5, criterion, start=2, end=12)
    trainer = quiet_trainer([pruning], max_epochs=3)
    trainer.fit(model, loader())
    assert trainer.global_step == 27
    zeros = [int((net.weight == 0).sum()) for net in (model.one, model.two)]
    assert sum(zeros) == 80
    assert not any(o._optimizer_step_post_hooks for o in trainer.optimizers)
    with pytest.raises(MisconfigurationException, match="Give both as whole numbers of steps"):
        quiet_trainer([Pruning(0.5)], max_epochs=3).fit(_Two(), loader())


def test_shared_and_frozen_weights() -> None:
    class Tied(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[1].linear.weight = self.blocks[0].linear.weight
            self.head.weight.requires_grad_(False)

    torch.manual_seed(1)
    model, pruning = Tied(), Pruning(0.75, **SETTINGS)
    before = model.head.weight.detach().clone()
    _fit([pruning, AverageWeights(decay=0.5)], model)
    assert pruning.masks is not None
    assert pruning.masks.counts() == {"blocks.0.linear.weight": 192}
    assert int((model.blocks[1].linear.weight == 0).sum()) == 192
    _equal(model.head.weight.detach(), before)


class _Kept(Logger):
    name, version = "kept", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step or 0, {k: v for k, v in metrics.items() if k.startswith("sparsity")}))


def test_sparsity_of_each_weight_is_logged_when_it_has_changed() -> None:
    logger, pruning = _Kept(), Pruning(0.8, start=0, end=8, every=4)
    model, trainer = _fit([pruning], logger=logger, log_every_n_steps=1)
    rows = [(step, row["sparsity"]) for step, row in logger.rows if row]
    middle = round(TOTAL * 0.7) / TOTAL
    assert rows == [(0, 0.0), (3, pytest.approx(middle)), (7, pytest.approx(0.8))]
    last = [row for _, row in logger.rows if row][-1]
    assert set(last) == {"sparsity", *(f"sparsity/{name}" for name in WEIGHTS)}
    for name in WEIGHTS:
        weight = model.get_parameter(name)
        assert last[f"sparsity/{name}"] == pytest.approx(int((weight == 0).sum()) / weight.numel())
    assert trainer.callback_metrics["sparsity"] == pytest.approx(0.8)


def test_a_run_that_ends_too_early_says_so() -> None:
    with pytest.warns(UserWarning, match="will not reach 0.8: its end=99 comes after 99 steps, and the run has 24"):
        _fit([Pruning(0.8, start=0, end=99)])

    class Stop(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = trainer.global_step >= 7

    with pytest.warns(UserWarning, match=r"ended at a sparsity of 0\.\d+ and not at 0.8: the run was over after 7"):
        _fit([Pruning(0.8, start=0.0, end=1.0), Stop()])


def test_two_of_four_and_a_layer_that_cannot() -> None:
    class Wide(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(FEATURES, 6), nn.ReLU(), nn.Linear(6, CLASSES))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    model = Wide()
    with pytest.raises(ValueError, match=r"'net.2.weight' \(6\). Name their layers in skip"):
        _fit([Pruning(pattern="2:4")], model)
    pruning = Pruning(pattern="2:4", skip=["net.2"])
    _fit([pruning], model)
    zeros = (model.net[0].weight == 0).view(6, 4, 4).sum(-1)
    assert (zeros == 2).all()
    assert pruning.accelerated_model is None


def test_pruning_at_once() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 4, 3))
    masks = prune_weights(model, 0.9, skip=["1"])
    assert masks.count() == int((model[0].weight == 0).sum()) == 259  # 0.9 of 288
    assert (model[1].weight != 0).all()
    with pytest.raises(ValueError, match=r"already, and 0.2 is below it"):
        prune_weights(model, 0.2)
    prune_weights(model, pattern="2:4", sparsity=0.5, skip=["0"])
    assert ((model[1].weight == 0).view(4, 2, 4, 9).sum(2) == 2).all()


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"target_sparsity": 1.0}, ValueError, "up to, and without, 1"),
        ({"target_sparsity": -0.1}, ValueError, "from 0 up to"),
        ({"target_sparsity": 80}, ValueError, "For 80 % write 0.8"),
        ({"target_sparsity": "0.8"}, TypeError, "must be a number"),
        ({"criterion": "magnitud"}, ValueError, "Did you mean 'magnitude'"),
        ({"scope": "locally"}, ValueError, "'global', 'layer'"),
        ({"start": 10, "end": 5}, ValueError, "end=5 is before start=10"),
        ({"start": 1.5}, ValueError, "a float from 0.0 to 1.0"),
        ({"end": -1}, ValueError, "end=-1 is not allowed"),
        ({"start": True}, TypeError, "start must be"),
        ({"every": 0}, ValueError, "every must be at least 1"),
        ({"every": 1.5}, TypeError, "whole number of steps"),
        ({"pattern": "1:4"}, ValueError, "Did you mean '2:4'"),
        ({"pattern": "2:4", "target_sparsity": 0.8}, ValueError, "which is a sparsity of 0.5"),
        ({"regrow": 1.0}, ValueError, "regrow=1.0 is not allowed"),
        ({"regrow": 0.2, "pattern": "2:4"}, ValueError, "does not go with pattern"),
        ({"criterion": "movement", "start": 0, "end": 0}, ValueError, "Give a later end"),
        ({"skip": "head"}, TypeError, r"write \['head'\]"),
    ],
)
def test_arguments_that_are_not_allowed(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Pruning(**arguments)


def test_what_cannot_be_pruned_in_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"ModelPruning and Pruning prune the same weights"):
        _fit([Pruning(0.5), ModelPruning("l1_unstructured", amount=0.5)])
    with pytest.raises(MisconfigurationException, match=r"end='?3.* after 3 steps and start=0.5 after 12"):
        _fit([Pruning(0.5, start=0.5, end=3)])
    with pytest.raises(ValueError, match=r"skip='heads' matches no layer.*Did you mean 'head'"):
        _fit([Pruning(0.5, skip=["heads"])])
    sharded: Any = SimpleNamespace(callbacks=[], strategy=object.__new__(FSDPStrategy))
    with pytest.raises(MisconfigurationException, match="does not work with FSDPStrategy"):
        refuse_pruning(sharded, Pruning)
    with pytest.raises(MisconfigurationException, match="Two Pruning callbacks"):
        _fit([Pruning(), Pruning(0.5)])
    structured = type("StructuredPruning", (Callback,), {"ratio": 0.5})()
    with pytest.raises(MisconfigurationException, match="first StructuredPruning and then Pruning"):
        _fit([Pruning(), structured])


def test_nothing_is_left_behind() -> None:
    pruning = Pruning(0.5, "movement", **SETTINGS)

    class Fails(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if len(self.losses) == 9:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    torch.manual_seed(1)
    trainer = quiet_trainer([pruning], max_epochs=4)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Fails(), loader(), loader())
    assert not trainer.optimizers[0]._optimizer_step_post_hooks


def test_weights_that_are_unfrozen_in_the_fit_are_named() -> None:
    class Unfreezes(Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            pl_module.head.weight.requires_grad_(trainer.current_epoch > 0)

    torch.manual_seed(1)
    model, pruning = Classifier(), Pruning(0.75, **SETTINGS)
    model.head.weight.requires_grad_(False)
    with pytest.warns(UserWarning, match=r"leaves 1 weights as they are that were frozen .*\(head.weight\)") as told:
        _fit([Unfreezes(), pruning], model)
    assert sum("were frozen" in str(one.message) for one in told) == 1
    assert int((model.head.weight == 0).sum()) == 0
    assert pruning.masks is not None
    assert pruning.masks.counts().keys() == {"blocks.0.linear.weight", "blocks.1.linear.weight"}


def test_at_the_end_a_copy_is_converted_where_the_device_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prune_module, "runs_semi_structured", lambda device: True)
    monkeypatch.setattr(prune_semi_structured, "runs_semi_structured", lambda device: True)
    monkeypatch.setattr(torch.sparse, "to_sparse_semi_structured", lambda weight: weight * 2)
    pruning = Pruning(pattern="2:4", start=1, end=3, skip=["head"])
    model, _ = _fit([pruning])
    twin = pruning.accelerated_model
    assert twin is not None
    assert twin is not model
    assert not twin.training
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            factor = 1 if name == "head" else 2
            _equal(twin.get_submodule(name).weight.detach(), factor * layer.weight.detach())
            assert layer.weight.requires_grad

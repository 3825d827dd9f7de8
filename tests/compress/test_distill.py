"""Distillation against the closed formula and a plain loop, and as a guest in Trainers."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_speedkit import AccumulationScheduler, AutoMicroBatch, CompileModel
from lightning_speedkit.compress.distill import Distillation, distillation_loss
from tests.compress.models import Digits, digit_loader, mlp
from tests.conformance.models import CLASSES, FEATURES, Classifier, classifier, loader, quiet_trainer
from tests.two_ranks import on_two_ranks

EXACT: dict[str, Any] = {"rtol": 0, "atol": 0}
TEACHER = "tests.conformance.models:classifier"


def test_loss_is_the_closed_formula() -> None:
    student, teacher, temperature = [[0.5, -1.0, 2.0], [0.0, 0.0, 1.0]], [[1.0, 0.0, 3.0], [2.0, -2.0, 0.0]], 3.0

    def softmax(row: list[float]) -> list[float]:
        powers = [math.exp(value / temperature) for value in row]
        return [power / sum(powers) for power in powers]

    by_row = [
        sum(q * math.log(q / p) for p, q in zip(softmax(s), softmax(t), strict=True))
        for s, t in zip(student, teacher, strict=True)
    ]
    expected = temperature**2 * sum(by_row) / 2
    got = distillation_loss(torch.tensor(student), torch.tensor(teacher), temperature)
    assert got.item() == pytest.approx(expected, rel=1e-5)
    maps = [torch.tensor(rows).T.reshape(1, 3, 2) for rows in (student, teacher)]
    assert distillation_loss(*maps, temperature, class_dim=1).item() == pytest.approx(expected, rel=1e-5)


def test_gradient_at_a_high_temperature_is_that_of_matching_logits() -> None:
    # Hinton et al. 2015, equation 4: for logits of mean zero it tends to (z - v) / N
    student, teacher = torch.tensor([[1.0, -1.0]], requires_grad=True), torch.tensor([[3.0, -3.0]])
    distillation_loss(student, teacher, temperature=1000.0).backward()
    assert student.grad is not None
    torch.testing.assert_close(student.grad, torch.tensor([[-1.0, 1.0]]), rtol=1e-3, atol=0)


def _plain_loop(student: nn.Module, teacher: nn.Module, weight: float, temperature: float) -> None:
    optimizer = torch.optim.Adam(student.parameters(), lr=0.01)
    for x, y in digit_loader(0, 256):
        logits = student(x)
        with torch.no_grad():
            target = teacher(x)
        soft = nn.functional.kl_div(
            torch.log_softmax(logits / temperature, 1),
            torch.log_softmax(target / temperature, 1),
            log_target=True,
            reduction="batchmean",
        )
        loss = (1 - weight) * nn.functional.cross_entropy(logits, y) + weight * temperature**2 * soft
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class _CallsItsNet(Digits):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return {"loss": nn.functional.cross_entropy(self.net(batch[0]), batch[1]), "extra": 1}


@pytest.mark.parametrize("kind", [Digits, _CallsItsNet], ids=["self(x)", "self.net(x), dict"])
def test_training_equals_a_plain_loop(kind: type[Digits]) -> None:
    torch.manual_seed(0)
    module, teacher = kind(mlp()), mlp()
    twin, before = copy.deepcopy(module.net), copy.deepcopy(teacher.state_dict())
    names = list(module.state_dict())
    trainer = quiet_trainer([Distillation(teacher, temperature=3.0, weight=0.7)], max_epochs=1)
    trainer.fit(module, digit_loader(0, 256))
    _plain_loop(twin, teacher, 0.7, 3.0)
    torch.testing.assert_close(module.net.state_dict(), twin.state_dict(), rtol=1e-5, atol=1e-6)
    assert trainer.callback_metrics["distillation_loss"] > 0
    # the teacher is as it was, and no part of the module
    torch.testing.assert_close(teacher.state_dict(), before, **EXACT)
    assert teacher.training
    assert all(parameter.grad is None and parameter.requires_grad for parameter in teacher.parameters())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in (*module.modules(), *teacher.modules()))
    assert list(module.state_dict()) == names
    assert "training_step" not in vars(module)


def _fit(callbacks: list[Any], **options: Any) -> Classifier:
    model = classifier()
    torch.manual_seed(3)
    quiet_trainer(callbacks, **{"max_epochs": 2, **options}).fit(model, loader(), loader())
    return model


def test_weight_zero_changes_no_bit() -> None:
    plain = _fit([])
    state = torch.get_rng_state()
    other = _fit([Distillation(TEACHER, weight=0.0)])
    torch.testing.assert_close(other.state_dict(), plain.state_dict(), **EXACT)
    torch.testing.assert_close(torch.get_rng_state(), state, **EXACT)


def test_the_teacher_is_asked_in_eval_mode_without_gradient_and_draws_nothing() -> None:
    asked: list[tuple[bool, bool]] = []

    class Asked(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            asked.append((self.training, torch.is_grad_enabled()))
            return super().forward(x)

    teacher = Asked(nn.Linear(FEATURES, CLASSES), nn.Dropout(0.5))
    _fit([Distillation(teacher)], max_epochs=1)
    assert asked == [(False, False)] * 6
    assert teacher[1].training


def test_accumulated_gradients_and_pieces_are_those_of_the_whole_batch() -> None:
    def run(batch: int, *callbacks: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        module = Digits(mlp())
        module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1)  # type: ignore[method-assign,assignment]
        torch.manual_seed(5)
        callbacks = (Distillation(mlp), *callbacks)
        for order in (callbacks, callbacks[::-1]):
            trainer = quiet_trainer(list(order), max_epochs=1)
            trainer.fit(module, digit_loader(0, 256, batch_size=batch))
        return dict(module.state_dict())

    expected = run(64)
    torch.testing.assert_close(run(32, AccumulationScheduler(2)), expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(run(64, AutoMicroBatch()), expected, rtol=1e-4, atol=1e-6)
    compiled = run(64, CompileModel(backend="eager", eager_steps=0))
    torch.testing.assert_close(compiled, expected, rtol=1e-4, atol=1e-6)


def test_mixed_precision_trains() -> None:
    model = _fit([Distillation(TEACHER)], precision="bf16-mixed")
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())


def test_features_pull_towards_those_of_the_teacher() -> None:
    torch.manual_seed(0)
    module, teacher = Digits(mlp(), lr=0.001), mlp()
    x = next(iter(digit_loader(0, 64)))[0]

    def distance() -> float:
        with torch.no_grad():
            return float((module.net[:2](x) - teacher[:2](x)).square().mean())

    before = distance()
    hints = Distillation(teacher, weight=0.0, features={"net.1": "1"}, feature_weight=10.0)
    quiet_trainer([hints], max_epochs=5).fit(module, digit_loader(0, 256))
    assert distance() < 0.5 * before


def test_weights_of_the_teacher_come_from_a_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = mlp()
    lightning, plain = tmp_path / "lightning.ckpt", tmp_path / "plain.pt"
    trainer = quiet_trainer([], max_epochs=1)
    trained = Digits(net)
    trainer.fit(trained, digit_loader(0, 128))
    trainer.save_checkpoint(lightning)
    torch.save(net.state_dict(), plain)
    results = []
    for distillation in (
        Distillation(net),
        Distillation("tests.compress.models:mlp", checkpoint=str(lightning)),
        Distillation(mlp, checkpoint=str(plain)),
    ):
        torch.manual_seed(1)
        module = Digits(mlp())
        quiet_trainer([distillation], max_epochs=1).fit(module, digit_loader(0, 128))
        results.append(module.state_dict())
    torch.testing.assert_close(results[0], results[1], **EXACT)
    torch.testing.assert_close(results[0], results[2], **EXACT)


def _on_a_rank() -> Any:
    model = _fit([Distillation(TEACHER, weight=0.8)], strategy="ddp", devices=2)
    return {name: value.clone() for name, value in model.named_parameters()}


def test_two_ranks_end_with_the_same_weights() -> None:
    first, second = on_two_ranks(_on_a_rank)
    torch.testing.assert_close(first, second, **EXACT)
    alone = _fit([])
    assert not torch.equal(first["head.weight"], alone.head.weight)


class _TwoNets(Digits):
    def __init__(self) -> None:
        super().__init__(mlp())
        self.head = nn.Linear(10, 10)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.net(batch[0])), batch[1])


class _WritesIntoItsInput(Digits):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.mul_(2))


class _Manual(Digits):
    def __init__(self) -> None:
        super().__init__(mlp())
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("module", "arguments", "match"),
    [
        (_TwoNets, {}, "several networks"),
        (lambda: _WritesIntoItsInput(mlp()), {}, "writes into its input"),
        (_Manual, {}, "distillation_loss"),
        (lambda: Digits(mlp()), {"teacher": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 9))}, r"\(64, 9\)"),
        (lambda: Digits(mlp()), {"student": "nets"}, "no module 'nets'"),
        (lambda: Digits(mlp()), {"features": {"net.1": "3"}}, "same shape"),
        (lambda: Digits(mlp()), {"teacher": "tests.compress.models:mpl"}, "package.module:Name"),
        (lambda: Digits(mlp()), {"class_dim": 7}, r"class_dim=7 is no dimension .*\(64, 10\); it is from -2 to 1"),
    ],
)
def test_what_cannot_work_says_what_to_do(module: Any, arguments: dict[str, Any], match: str) -> None:
    distillation = Distillation(**{"teacher": mlp, **arguments})
    with pytest.raises((MisconfigurationException, ValueError), match=match):
        quiet_trainer([distillation], max_epochs=1).fit(module(), digit_loader(0, 128))


def test_a_teacher_inside_the_module_is_refused() -> None:
    module = Digits(mlp())
    with pytest.raises(MisconfigurationException, match="shares weights"):
        quiet_trainer([Distillation(module.net)], max_epochs=1).fit(module, digit_loader(0, 128))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"teacher": 3}, TypeError),
        ({"temperature": 0}, ValueError),
        ({"weight": 1.5}, ValueError),
        ({"weight": "half"}, TypeError),
        ({"feature_weight": -1}, ValueError),
        ({"class_dim": 1.0}, TypeError),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(arguments))):
        Distillation(**{"teacher": mlp, **arguments})

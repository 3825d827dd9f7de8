"""What every callback must keep to, whatever its technique."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_speedkit.registry import Part
from tests.conformance.cases import CALLBACKS, Case
from tests.conformance.models import Classifier, classifier, loader, quiet_trainer
from tests.two_ranks import on_two_ranks

each = pytest.mark.parametrize("case", CALLBACKS, ids=lambda case: case.name)


def _fit(callbacks: list[Callback], model: LightningModule | None = None, **arguments: Any) -> tuple[Any, Trainer]:
    model = model or classifier()
    trainer = quiet_trainer(callbacks, **{"max_epochs": 2, **arguments})
    torch.manual_seed(3)
    trainer.fit(model, loader(), loader())
    return model, trainer


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@each
def test_neutral_setting_is_bit_identical(case: Case) -> None:
    plain, _ = _fit([])
    random_after_plain = torch.get_rng_state()
    other, _ = _fit([case.neutral.build()])
    torch.testing.assert_close(other.losses, plain.losses, rtol=0, atol=0)
    _equal(other.state_dict(), plain.state_dict())
    torch.testing.assert_close(torch.get_rng_state(), random_after_plain, rtol=0, atol=0)


@each
def test_resume_reaches_the_weights_of_the_unbroken_run(case: Case, tmp_path: Path) -> None:
    whole, _ = _fit([case.working.build()], max_epochs=4)

    broken, trainer = _fit([case.working.build()], max_epochs=2)
    path = tmp_path / "middle.ckpt"
    trainer.save_checkpoint(path)
    torch.load(path, weights_only=True)  # plain Python and tensors only
    random_state = torch.get_rng_state()

    fresh = classifier()
    resumed = quiet_trainer([case.working.build()], max_epochs=4)
    torch.set_rng_state(random_state)
    resumed.fit(fresh, loader(), loader(), ckpt_path=path)
    assert len(broken.losses) + len(fresh.losses) == len(whole.losses)
    _equal(fresh.state_dict(), whole.state_dict())


@each
def test_arguments_of_the_caller_are_unchanged(case: Case) -> None:
    arguments = copy.deepcopy(dict(case.working.arguments))
    kept = copy.deepcopy(arguments)
    _fit([case.working.cls(**arguments)])
    assert arguments == kept


@each
def test_the_same_objects_fit_twice(case: Case) -> None:
    callback, model = case.working.build(), classifier()
    trainer = quiet_trainer([callback], max_epochs=1)
    trainer.fit(model, loader(), loader())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader(), loader())
    other = quiet_trainer([callback], max_epochs=1)
    other.fit(classifier(), loader(), loader())
    assert trainer.current_epoch == 2
    assert other.current_epoch == 1


@each
def test_validate_test_and_predict_run_alone(case: Case) -> None:
    plain, plain_trainer = classifier(), quiet_trainer([])
    expected = plain_trainer.validate(plain, loader(), verbose=False)
    model = classifier()
    model.test_step = model.validation_step  # type: ignore[method-assign]
    trainer = quiet_trainer([case.working.build()])
    assert trainer.validate(model, loader(), verbose=False) == expected
    assert trainer.test(model, loader(), verbose=False) == expected
    model.predict_step = lambda batch, batch_idx: model(batch[0])  # type: ignore[method-assign]
    predicted = trainer.predict(model, loader())
    assert predicted is not None
    assert len(predicted) == len(loader())


@each
@pytest.mark.parametrize("setting", [{"fast_dev_run": True}, {"barebones": True}], ids=lambda s: next(iter(s)))
def test_fast_dev_run_and_barebones_are_honoured(case: Case, setting: dict[str, bool], tmp_path: Path) -> None:
    # barebones refuses settings that cost time, among them the ones that quiet_trainer turns off
    trainer = Trainer(accelerator="cpu", max_steps=2, callbacks=[case.working.build()], **setting)  # type: ignore[arg-type]
    trainer.fit(classifier(), loader(), loader())
    assert trainer.global_step == (1 if "fast_dev_run" in setting else 2)
    assert [p for p in tmp_path.rglob("*") if p.is_file() and "lightning_logs" not in p.parts] == []


class _Fails(Classifier):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if len(self.losses) == 3:
            raise ZeroDivisionError("a fault of the user's code")
        return super().training_step(batch, batch_idx)


@each
def test_after_an_exception_everything_is_as_it_was(case: Case, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = _Fails()
    classes = {name: type(module) for name, module in model.named_modules()}
    trainer = quiet_trainer([case.working.build()], max_epochs=1)
    with pytest.raises(ZeroDivisionError, match="a fault of the user's code"):
        trainer.fit(model, loader(), loader())
    assert {name: type(module) for name, module in model.named_modules()} == classes
    assert trainer.accumulate_grad_batches == 1
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


@each
def test_global_settings_are_left_as_found(case: Case) -> None:
    def settings() -> dict[str, Any]:
        return {
            "engine": torch.backends.quantized.engine,
            "threads": torch.get_num_threads(),
            "grad": torch.is_grad_enabled(),
            "dtype": torch.get_default_dtype(),
            "matmul": torch.get_float32_matmul_precision(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "benchmark": torch.backends.cudnn.benchmark,
            "mha": torch.backends.mha.get_fastpath_enabled(),
            "levels": {name: logging.getLogger(name).level for name in ("", "lightning", "lightning.pytorch", "torch")},
        }

    _fit([])  # what Lightning itself settles on a first fit
    before = settings()
    model, _ = _fit([case.working.build()])
    assert settings() == before
    assert model.training


@each
def test_module_of_the_user_keeps_its_names_and_classes(case: Case) -> None:
    plain = classifier()
    model, _ = _fit([case.working.build()])
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]


def _fit_on_a_rank(part: Part) -> dict[str, Tensor]:
    model, trainer = _fit([part.build()], strategy="ddp", devices=2, max_epochs=2)
    assert trainer.world_size == 2
    return {name: value.clone() for name, value in model.named_parameters()}


@each
def test_two_ranks_end_with_the_same_weights(case: Case) -> None:
    first, second = on_two_ranks(_fit_on_a_rank, case.working)
    _equal(first, second)
    start = dict(classifier().named_parameters())
    assert any(not torch.equal(first[name], start[name]) for name in first), "nothing was trained"

"""The callback for torch's float32 switches: what it sets, when, and that all is as it was afterwards."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_speedkit.precision import MatmulPrecision, set_matmul_precision
from tests.precision.test_numeric_switches import _as_found, everything  # noqa: F401


class Seen(Callback):
    """The matmul precision and the kernel search at each hook."""

    def __init__(self) -> None:
        self.seen: dict[str, tuple[str, bool]] = {}

    def _look(self, hook: str) -> None:
        self.seen[hook] = (torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._look("fit")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._look("train")

    def on_validation_batch_start(self, *arguments: Any) -> None:
        self._look("validation")

    def on_test_batch_start(self, *arguments: Any) -> None:
        self._look("test")

    def on_predict_batch_start(self, *arguments: Any) -> None:
        self._look("predict")

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._look("end")


def _trainer(*callbacks: Callback, **arguments: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "limit_train_batches": 2,
        "limit_val_batches": 1,
        "limit_test_batches": 1,
        "limit_predict_batches": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(**{**defaults, **arguments}, callbacks=list(callbacks))


def test_it_holds_in_every_stage_and_is_over_afterwards() -> None:
    found, seen = everything(), Seen()
    trainer, model = _trainer(MatmulPrecision("high", "ieee", True), seen), BoringModel()
    with pytest.warns(UserWarning, match=r"convolutions='ieee' and autotune=True has no effect on this device \(cpu\)"):
        trainer.fit(model)
    assert everything() == found
    trainer.test(model, verbose=False)
    trainer.predict(model, model.predict_dataloader())
    assert everything() == found
    hooks = ("fit", "train", "validation", "test", "predict", "end")
    assert seen.seen == dict.fromkeys(hooks, ("high", True))


def test_nothing_is_set_by_the_neutral_setting() -> None:
    found, seen = everything(), Seen()
    torch.set_float32_matmul_precision("medium")
    _trainer(MatmulPrecision(None), seen).fit(BoringModel())
    assert {value for value, _ in seen.seen.values()} == {torch.get_float32_matmul_precision()} == {"medium"}
    torch.set_float32_matmul_precision(found["matmul, old name"])


def test_after_an_exception_all_is_as_it_was() -> None:
    class Fails(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert torch.get_float32_matmul_precision() == "medium"
            raise ZeroDivisionError("a fault of the user's code")

    found = everything()
    with pytest.raises(ZeroDivisionError, match="a fault of the user's code"):
        _trainer(MatmulPrecision("medium")).fit(Fails())
    assert everything() == found


def test_what_the_user_sets_during_the_run_stays_and_is_told_once() -> None:
    class Sets(BoringModel):
        def on_train_start(self) -> None:
            torch.set_float32_matmul_precision("medium")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _trainer(MatmulPrecision("high")).fit(Sets())
    assert torch.get_float32_matmul_precision() == "medium"
    assert sum("MatmulPrecision leaves matmul as it is" in str(warning.message) for warning in caught) == 1


def test_a_test_inside_a_fit_does_not_end_it() -> None:
    seen = Seen()

    class Tests(BoringModel):
        def on_train_end(self) -> None:
            callback.setup(self.trainer, self, "test")
            callback.teardown(self.trainer, self, "test")

    found, callback = everything(), MatmulPrecision("high")
    _trainer(callback, seen).fit(Tests())
    assert seen.seen["end"][0] == "high"
    assert everything() == found


def test_the_second_fit_of_one_callback_and_its_copies() -> None:
    found, callback = everything(), MatmulPrecision("high")
    for one in (callback, callback, copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        seen = Seen()
        _trainer(one, seen).fit(BoringModel())
        assert seen.seen["train"][0] == "high"
        assert everything() == found


def test_two_of_them_are_refused() -> None:
    found = everything()
    with pytest.raises(MisconfigurationException, match="Two MatmulPrecision"):
        _trainer(MatmulPrecision("high"), MatmulPrecision("highest")).fit(BoringModel())
    assert everything() == found


def test_a_kernel_search_in_a_deterministic_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    with pytest.raises(MisconfigurationException, match=r"autotune=True.*undoes deterministic=True"):
        _trainer(MatmulPrecision("high", autotune=True)).fit(BoringModel())
    _trainer(MatmulPrecision("high", autotune=False)).fit(BoringModel())


@pytest.mark.parametrize(
    ("capability", "hip", "warns"), [((7, 5), None, 1), ((8, 0), None, 0), ((9, 0), None, 0), ((9, 0), "6.4", 0)]
)
def test_tf32_where_there_is_none_is_told(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], hip: str | None, warns: int
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        MatmulPrecision("high", "tf32", True)._warn_of_no_effect(torch.device("cuda", 0))
    assert sum("matmul='high' has no effect on this device (cuda)" in str(w.message) for w in caught) == warns


def test_the_function_alone() -> None:
    found = everything()
    undo = set_matmul_precision("medium", "ieee", True)
    assert torch.get_float32_matmul_precision() == "medium"
    assert torch.backends.cudnn.allow_tf32 is False
    assert torch.backends.cudnn.benchmark is True
    torch.backends.cudnn.benchmark = False
    assert undo() == ("autotune",)
    assert undo() == ()
    assert everything() == found


def test_products_of_a_cpu_stay_close_at_every_level() -> None:
    draw = torch.Generator().manual_seed(0)
    one, other = (torch.randn(64, 64, generator=draw) for _ in range(2))
    exact = (one.double() @ other.double()).float()
    for level, bits in (("highest", 23), ("high", 10), ("medium", 7)):
        undo = set_matmul_precision(level)
        assert bool(((one @ other - exact).abs() <= 4 * 2.0**-bits * (one.abs() @ other.abs())).all())
        undo()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"matmul": "tf32"}, ValueError, "matmul='tf32' is not known; use one of 'highest', 'high', 'medium', or None"),
        ({"matmul": True}, TypeError, "matmul=True must be one of .* got bool"),
        ({"convolutions": "high"}, ValueError, "convolutions='high' is not known; use one of 'tf32', 'ieee'"),
        ({"convolutions": False}, TypeError, "convolutions=False must be one of 'tf32', 'ieee', or None; got bool"),
        ({"autotune": "yes"}, TypeError, "autotune='yes' must be True, False or None; got str"),
        ({"autotune": 1}, TypeError, "autotune=1 must be True, False or None; got int"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    found = everything()
    for make in (MatmulPrecision, set_matmul_precision):
        with pytest.raises(error, match=message):
            make(**arguments)
    assert everything() == found

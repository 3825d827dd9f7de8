"""Runs a module's own ``validation_step`` once more, quietly and alone: on recorded batches, or for its metrics.

What it logs reaches no tracker, and ``trainer.log_dir`` is a folder that is gone afterwards. A step that calls a
tracking library by itself, as ``wandb.log`` does, still does so.
"""

from __future__ import annotations

import copy
import inspect
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core import rank_zero
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torchmetrics import Metric
from typing_extensions import override

from lightning_speedkit.compress.calls import Call, record_calls, replay
from lightning_speedkit.compress.float_copy import copy_module
from lightning_speedkit.errors import QuantizationError
from lightning_speedkit.measure.lightning_internals import forget_metric_attributes

__all__ = ["network_calls", "validation_metrics"]

_LIFE = ("prepare_data", "setup", "teardown", "on_exception", "state_dict", "load_state_dict")
DataT = TypeVar("DataT", bound=LightningDataModule)


def network_calls(module: LightningModule, batches: Sequence[Any]) -> list[Call]:
    """How the network of ``module`` is called on ``batches``, which are as the training step got them.

    ``module`` is a copy that this function may use up. It runs ``validation_step``; where that is not defined or does
    not take training batches, ``training_step``; where that does not run either, the forward of what looks like the
    input. All of it in eval mode and without gradients.
    """
    failures = []
    for name, step in _steps(module):
        try:
            calls = _recorded(module, step, batches)
            if calls and not _answers(module, calls):  # such as a forward that asks self.trainer
                calls = _recorded(module, step, batches, include_root=False)
        except Exception as error:  # the code of the user, run out of its place; the next step is tried
            failures.append(f"{name}: {type(error).__name__}: {error}")
            continue
        if calls and _answers(module, calls):
            return calls
        failures.append(f"{name}: it calls no module with parameters that can be called alone")
    raise QuantizationError(f"No step of {type(module).__name__} could be run on training batches ({failures}).")


def _recorded(module: LightningModule, step: Any, batches: Sequence[Any], *, include_root: bool = True) -> list[Call]:
    twin = copy_module(module)
    twin.validation_step = step(twin)  # type: ignore[method-assign]
    for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
        setattr(twin, hook, _unchanged)  # these batches have been through them
    _disarm(twin, LightningModule, ("on_validation_epoch_end", "on_validation_end"))  # the metrics come later
    with record_calls(twin, include_root=include_root) as calls:
        _validate(twin, _Batches(batches))
    return calls


def _answers(module: LightningModule, calls: Sequence[Call]) -> bool:
    try:
        return bool(replay(copy_module(module), calls))
    except Exception:
        return False


def validation_metrics(
    module: LightningModule,
    loaders: Any,
    *,
    datamodule: LightningDataModule | None = None,
    limit_batches: int | None = None,
    device: str = "cpu",
    in_float32: bool = False,
) -> tuple[dict[str, float], int]:
    """The metrics that ``module`` logs in validation, and the number of batches of each loader that were run at most.

    ``module`` is a copy that this function may use up. The data hooks of ``datamodule`` are applied; it is not set up
    or torn down, and stays as it is. ``in_float32`` turns the floating-point tensors of the batches to float32.
    """
    limit = 1.0 if limit_batches is None else limit_batches
    if datamodule is None:
        trainer = _validate(module, loaders, limit=limit, device=device, in_float32=in_float32)
    else:
        view = _view(datamodule)
        view.val_dataloader = lambda: loaders  # type: ignore[method-assign]
        trainer = _validate(module, datamodule=view, limit=limit, device=device, in_float32=in_float32)
    values = {name: float(value) for name, value in trainer.callback_metrics.items() if value.numel() == 1}
    return values, int(max(cast("Sequence[float]", trainer.num_val_batches), default=0))


def _view(datamodule: DataT) -> DataT:
    """An object with the attributes and data hooks of ``datamodule`` that has nothing to set up, close or restore.

    A plain copy would close the loaders of the original when a validation fails, or when it is collected.
    """
    cls = type(datamodule)
    plain = {name: getattr(LightningDataModule, name) for name in _LIFE}
    namespace = {**plain, "__del__": _nothing, "__module__": cls.__module__}
    view: Any = object.__new__(type(cls.__name__, (cls,), namespace))
    vars(view).update({name: value for name, value in vars(datamodule).items() if name not in _LIFE})
    return cast("DataT", view)


def _validate(
    module: LightningModule,
    loaders: Any = None,
    *,
    datamodule: LightningDataModule | None = None,
    limit: float = 1.0,
    device: str = "cpu",
    in_float32: bool = False,
) -> Trainer:
    _disarm(module, LightningModule, ("prepare_data", "setup", "teardown", "configure_model", "configure_callbacks"))
    for part in module.modules():
        if isinstance(part, LightningModule):
            forget_metric_attributes(part)  # they are known by their ids, and a copy has other ones
        if isinstance(part, Metric):
            part.distributed_available_fn = _never  # the other ranks wait at a barrier and cannot answer
    with _quiet(), tempfile.TemporaryDirectory(prefix="validation-") as folder:
        trainer = Trainer(
            accelerator=device,
            devices=1,
            plugins=[LightningEnvironment(), *([_InFloat32()] if in_float32 else [])],
            logger=_NoTracker(folder),
            default_root_dir=folder,
            limit_val_batches=limit,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            inference_mode=False,
        )
        trainer.validate(module, loaders, datamodule=datamodule, verbose=False)
    return trainer


class _InFloat32(Precision):
    """What ``precision="64-true"`` and the like do to batches, for a copy in float32."""

    @override
    def convert_input(self, data: Any) -> Any:
        return apply_to_collection(data, Tensor, lambda t: t.float() if t.is_floating_point() else t, allow_frozen=True)


class _Answers:
    """Answers every attribute, call and item with itself, as the client of any tracker would be used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    __call__ = lambda self, *_, **__: self  # noqa: E731

    def __getitem__(self, key: Any) -> _Answers:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __enter__(self) -> _Answers:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class _NoTracker(DummyLogger):
    """A logger that keeps nothing; what a module writes into its folder goes with that."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder

    @property
    @override
    def experiment(self) -> Any:
        return _Answers()

    @property
    @override
    def save_dir(self) -> str:
        return self._folder

    @property
    def log_dir(self) -> str:
        """Where most loggers write."""
        return self._folder


class _Batches:
    """A loader of batches that are there already."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return (copy.deepcopy(batch) for batch in self._batches)

    def __len__(self) -> int:
        return len(self._batches)


def _steps(module: LightningModule) -> Iterator[tuple[str, Callable[[LightningModule], Callable[..., Any]]]]:
    if is_overridden("validation_step", module):
        yield "validation_step", lambda twin: twin.validation_step
    if is_overridden("training_step", module) and module.automatic_optimization:
        yield "training_step", lambda twin: _without_result(twin.training_step)
    if type(module).forward is not nn.Module.forward:
        yield "forward", lambda twin: _without_result(lambda batch, _: twin(_input_of(batch)))


def _input_of(batch: Any) -> Any:
    if isinstance(batch, dict):
        return next(value for value in batch.values() if isinstance(value, Tensor))
    return batch[0] if isinstance(batch, (list, tuple)) else batch


@contextmanager
def _quiet() -> Iterator[None]:
    # what the inner Trainer says about devices and workers was said by the outer one
    log, mute = rank_zero.log, _Mute()
    log.addFilter(mute)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.removeFilter(mute)


class _Mute(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno > logging.INFO


def _disarm(target: object, base: type, hooks: Sequence[str]) -> None:
    # back to what Lightning defines: where prepare_data is overridden, if only by an empty function, the Trainer meets
    # the other ranks, who are waiting elsewhere
    for hook in hooks:
        setattr(target, hook, MethodType(getattr(base, hook), target))


def _without_result(function: Callable[..., Any]) -> Callable[[Any, int], None]:
    try:
        inspect.signature(function).bind(None, 0)
        takes_index = True
    except TypeError:  # a training_step(batch)
        takes_index = False

    def step(batch: Any, batch_idx: int) -> None:
        function(batch, batch_idx) if takes_index else function(batch)

    return step


def _never() -> bool:
    return False


def _unchanged(batch: Any, *_: Any) -> Any:
    return batch


def _nothing(_: object) -> None:
    pass

"""One trial of a batch size in a Trainer's own run, beside its loops: training steps, then validation.

Each step goes through the Trainer's strategy and precision, in Lightning's order: the gradients of the step before are
still there in the forward pass. Ranks do not wait for each other inside a step: the model runs without DDP's wrapper,
and after each phase they agree on whether all of them had room.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from lightning_speedkit.measure.lightning_batch_size import made_train_loader, made_val_loaders
from lightning_speedkit.measure.lightning_loaders import batch_on_device
from lightning_speedkit.measure.out_of_memory import is_out_of_memory, release_memory
from lightning_speedkit.memory.batch_size_find import BatchSizeTrial, peak_bytes, start_peak, wait_for
from lightning_speedkit.memory.batch_size_ranks import FAILED, FITS, NO_ROOM, Ranks
from lightning_speedkit.memory.batch_size_stream import NoWholeBatch, only_whole_batches

__all__ = ["Trial"]

_VALIDATED = 2  # batches of each validation loader
_SKIPPED = 8  # steps that a gradient scaler may leave out before it has found its scale


class Trial:
    """Runs with the loaders that the Trainer would make now; what it changes is not put back.

    Args:
        trainer: In ``on_fit_start``, with ``strategy.model`` being the module itself.
        ranks: Those that take part.
        steps: Training steps.
    """

    def __init__(self, trainer: pl.Trainer, ranks: Ranks, steps: int) -> None:
        self._trainer, self._ranks, self._steps = trainer, ranks, steps
        self._module = trainer.lightning_module
        self._device = trainer.strategy.root_device
        self._seconds: list[float] = []

    def run(self, size: int, samples: int, at_hand: int | None) -> BatchSizeTrial:
        """Try batches of ``samples``, of which each rank has ``at_hand`` in an epoch."""
        if self._device.type != "cpu":  # there the garbage collector would be all of it, and take longer than the steps
            release_memory(self._device)
        start_peak(self._device)
        self._seconds = []
        loader, checked = made_train_loader(self._trainer), made_val_loaders(self._trainer)
        full = self._steps if at_hand is None else max(1, at_hand // samples)
        batches, first = _again_and_again(loader, full), list[Any]()
        phases: dict[str, Callable[[], None]] = {}
        if only_whole_batches(loader):
            phases |= {"loading": lambda: first.append(next(batches))}
        phases |= {"training": lambda: self._train(chain(first, batches))}
        if checked:
            phases |= {"validation": lambda: self._validate(checked), "validation ": self._end_validation}
        try:
            failed = next((name.strip() for name, phase in phases.items() if not self._fits(name, phase)), "")
        finally:
            loader.reset()
        if failed:
            release_memory(self._device)
            return BatchSizeTrial(size, samples, False, failed)
        peak = peak_bytes(self._device)
        seconds, most = self._ranks.largest([min(self._seconds[1:]), float(peak or 0)])
        return BatchSizeTrial(size, samples, True, "", seconds, None if peak is None else int(most))

    def _fits(self, name: str, phase: Callable[[], None]) -> bool:
        """Whether a phase has room on all ranks; an error that means something else ends all of them."""
        state, failure = FITS, None
        try:
            phase()
        except Exception as error:
            ended = name == "loading" and isinstance(error, NoWholeBatch)  # the stream, before a batch was full
            state = NO_ROOM if ended or is_out_of_memory(error) else FAILED
            failure = error if state == FAILED else None
        (worst,) = self._ranks.largest([state])
        if failure is not None:
            raise failure
        if worst == FAILED:
            raise RuntimeError("Another rank failed while batch sizes were tried; its own message says why.")
        return worst == FITS

    def _train(self, batches: Iterator[Any]) -> None:
        module, scaler = self._module, getattr(self._trainer.precision_plugin, "scaler", None)
        module.on_fit_start()  # Lightning calls it after the callbacks' own, in which this runs
        module.on_train_start()
        module.on_train_epoch_start()
        done = skipped = 0
        while done < self._steps:
            batch = next(batches)
            begin, scale = time.perf_counter(), scaler.get_scale() if scaler is not None else 0.0
            self._step(batch, done + skipped)
            wait_for(self._device)
            if scaler is not None and scaler.get_scale() < scale and skipped < _SKIPPED:
                skipped += 1  # the optimizer has made no step, so it has no state yet
                continue
            self._seconds.append(time.perf_counter() - begin)
            done += 1

    def _step(self, batch: Any, index: int) -> None:
        trainer, module = self._trainer, self._module
        batch = batch_on_device(trainer, batch)
        module.on_train_batch_start(batch, index)
        takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        arguments = (batch, index) if takes_index else (batch,)
        output: Any = None
        if not module.automatic_optimization:
            output = trainer.strategy.training_step(*arguments)
        else:
            optimizer = trainer.optimizers[0]

            def closure() -> Tensor | None:
                nonlocal output
                output = trainer.strategy.training_step(*arguments)
                loss: Tensor | None = output["loss"] if isinstance(output, dict) else output
                module.on_before_zero_grad(optimizer)
                module.optimizer_zero_grad(trainer.current_epoch, index, optimizer)
                if loss is not None:
                    trainer.strategy.backward(loss, optimizer)
                return loss

            trainer.strategy.optimizer_step(optimizer, closure, model=module)
        # Lightning hands on a dict, whatever training_step returned.
        module.on_train_batch_end({"loss": output} if isinstance(output, Tensor) else output or {}, batch, index)

    def _validate(self, loaders: list[Any]) -> None:
        trainer, module = self._trainer, self._module
        several = len(loaders) > 1
        takes_index = is_param_in_hook_signature(module.validation_step, "batch_idx", min_args=2)
        trainer.validating = True
        with torch.no_grad():
            module.on_validation_model_eval()
            module.on_validation_start()
            module.on_validation_epoch_start()
            for place, loader in enumerate(loaders):
                for index, batch in enumerate(islice(loader, _VALIDATED)):
                    moved = batch_on_device(trainer, batch, place)
                    which = (place,) if several else ()  # of hooks too, which may not take it
                    module.on_validation_batch_start(moved, index, *which)
                    output = trainer.strategy.validation_step(moved, *([index] if takes_index else []), *which)
                    module.on_validation_batch_end(output, moved, index, *which)
            wait_for(self._device)

    def _end_validation(self) -> None:
        # ranks may wait for each other here, in metrics: all of them have had room so far
        with torch.no_grad():
            self._module.on_validation_epoch_end()
            self._module.on_validation_end()
            wait_for(self._device)


def _again_and_again(loader: Any, full: int) -> Iterator[Any]:
    """The batches of a CombinedLoader that are full, over and over."""
    while True:
        found = False
        for batch, *_ in islice(loader, full):
            found = True
            yield batch
        if not found:
            raise NoWholeBatch("There are no training batches, so batch sizes cannot be tried.")

"""Knowledge distillation: a small network learns from the outputs of a larger one beside the labels.

What it does: adds to the loss of ``training_step`` how far the module's class probabilities are from those of a teacher
for the same input. ``distillation_loss`` is that term for a loop of your own, ``Distillation`` adds it to any
LightningModule without a change of its code. When it helps: small networks, and ones that were pruned, made lighter or
quantized and have quality to regain. What it costs: a forward pass of the teacher per step, without gradients, and
its weights in memory.

Source: Hinton, Vinyals and Dean 2015 (arXiv 1503.02531); for features, FitNets (Romero et al. 2015, arXiv 1412.6550).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_speedkit.compress.distill_calls import NetworkCall, WatchedCalls, check_calls
from lightning_speedkit.compress.distill_step import wrap_training_step
from lightning_speedkit.compress.distill_teacher import Teacher, made_teacher

__all__ = ["Distillation", "distillation_loss"]


def distillation_loss(student: Tensor, teacher: Tensor, temperature: float = 2.0, class_dim: int = -1) -> Tensor:
    """``T² KL(softmax(teacher / T) || softmax(student / T))``, the mean over all but the classes, in float32.

    The factor keeps the size of the gradient the same for every temperature.

    Args:
        student: Logits with a gradient.
        teacher: Logits of the same shape; no gradient flows into them.
        temperature: Above 0; a higher one makes both softer.
        class_dim: Which dimension holds the classes.

    Raises:
        ValueError: The shapes differ, or have no dimension ``class_dim``.

    >>> round(distillation_loss(torch.tensor([[0.0, 0.0]]), torch.tensor([[2.0, 0.0]]), temperature=2.0).item(), 4)
    0.4438
    """
    if student.shape != teacher.shape:
        raise ValueError(
            f"The student gave logits of shape {tuple(student.shape)} and the teacher of {tuple(teacher.shape)}; both "
            "must tell the same classes apart, for the same input."
        )
    if not -student.ndim <= class_dim < student.ndim:
        raise ValueError(
            f"class_dim={class_dim} is no dimension of logits of shape {tuple(student.shape)}; it is from "
            f"{-student.ndim} to {student.ndim - 1}, the one that holds the classes."
        )
    log_student = torch.log_softmax(student.float() / temperature, dim=class_dim)
    log_teacher = torch.log_softmax(teacher.detach().float() / temperature, dim=class_dim)
    return (log_teacher.exp() * (log_teacher - log_student)).sum(dim=class_dim).mean() * temperature**2


class Distillation(Callback):
    """Trains with ``(1 - weight) * loss + weight * distillation_loss``, where ``loss`` is that of ``training_step``.

    The teacher gets what the module's network gets in the step, in eval mode and without gradients, on the same device
    and in the same autocast. It is no part of the module: not of its checkpoints, its optimizer or its DDP buckets, and
    a teacher that was given as an object gets its mode and device back. The term is logged as ``distillation_loss``.

    Override :meth:`logits` where a network answers with something else than a tensor, an object or dict with
    ``logits``, or a tuple that begins with them.

    Args:
        teacher: A module, a function or class that makes one, or the path of the latter, ``"package.module:Name"``.
        checkpoint: The file of its weights, of a Trainer or a ``state_dict``. A class of LightningModule is made with
            the hyperparameters that a Trainer saved. A class without a checkpoint is told of by a warning: a new one
            has random weights.
        temperature: Softens both distributions, above 0.
        weight: The share of the teacher, from 0 to 1. At 0, without features, nothing is done at all.
        student: The name of the submodule that is the network; by default the one that the step calls: the module
            itself or one that it holds.
        class_dim: Which dimension of the logits holds the classes; 1 for maps of shape (batch, classes, height, width).
        features: ``{name in the module: name in the teacher}`` of modules whose outputs are to be alike: their mean
            squared difference is added. They need the same shape.
        feature_weight: What that is multiplied with.

    Raises:
        ValueError: An argument is not allowed, a name is not there, or shapes differ.
        MisconfigurationException: At ``fit``: manual optimization, a teacher that shares weights with the module, or a
            step that calls no network, or several.

    Example:

        >>> distillation = Distillation("lightning_speedkit.demo.model:DigitNet", "large.ckpt", temperature=4.0)
        >>> distillation.weight
        0.5
    """

    def __init__(
        self,
        teacher: str | nn.Module | Callable[[], nn.Module],
        checkpoint: str | None = None,
        temperature: float = 2.0,
        weight: float = 0.5,
        student: str | None = None,
        class_dim: int = -1,
        features: dict[str, str] | None = None,
        feature_weight: float = 1.0,
    ) -> None:
        super().__init__()
        if not (isinstance(teacher, (str, nn.Module)) or callable(teacher)):
            raise TypeError(f"teacher must be a module, what makes one, or 'package.module:Name', got {teacher!r}.")
        if isinstance(class_dim, bool) or not isinstance(class_dim, int):
            raise TypeError(f"class_dim must be a whole number, got {class_dim!r}.")
        _check_number("temperature", temperature, lambda value: 0 < value < float("inf"), "above 0")
        _check_number("weight", weight, lambda value: 0 <= value <= 1, "from 0 to 1")
        _check_number("feature_weight", feature_weight, lambda value: 0 <= value < float("inf"), "at least 0")
        self.teacher, self.checkpoint = teacher, checkpoint
        self.temperature, self.weight = float(temperature), float(weight)
        self.student, self.class_dim = student, class_dim
        self.features, self.feature_weight = dict(features or {}), float(feature_weight)
        self._network: nn.Module | None = None
        self._teacher: Teacher | None = None
        self._watched: WatchedCalls | None = None
        self._undo: Callable[[], None] | None = None

    def logits(self, output: Any) -> Tensor:
        """The logits in what a network answers, of the module and of the teacher alike."""
        found = output
        if isinstance(output, Mapping):
            found = output.get("logits")
        elif isinstance(getattr(output, "logits", None), Tensor):
            found = output.logits
        elif isinstance(output, (tuple, list)) and output:
            found = output[0]
        if not isinstance(found, Tensor):
            raise ValueError(
                f"No logits in an output of type {type(output).__name__}. Name the submodule that yields them by "
                "student=..., or override Distillation.logits()."
            )
        return found

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit" or not self._does_something():
            return
        if not pl_module.automatic_optimization:
            raise MisconfigurationException(
                f"Distillation adds to the loss that training_step returns, and {type(pl_module).__name__} takes its "
                "steps itself (automatic_optimization = False). Add distillation_loss() to your loss there."
            )
        self._network = made_teacher(self.teacher, self.checkpoint)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._network is None:
            return
        self._put_back()
        own = {id(parameter) for parameter in pl_module.parameters()}
        if any(id(parameter) in own for parameter in self._network.parameters()):
            raise MisconfigurationException(
                "The teacher shares weights with the module that is trained, so it would be trained too, and saved in "
                "every checkpoint. Give a copy of it, and keep the teacher out of the module."
            )
        for kind, root, names in (
            ("student", pl_module, [*self.features, *([self.student] if self.student is not None else [])]),
            ("teacher", self._network, list(self.features.values())),
        ):
            known = dict(root.named_modules())
            if unknown := [name for name in names if name not in known]:
                raise ValueError(f"The {kind} has no module {unknown[0]!r}; it has {', '.join(list(known)[1:9])}.")
        self._teacher = Teacher(self._network, trainer.strategy.root_device, list(self.features.values()))
        self._watched = WatchedCalls(pl_module, self.student, list(self.features))
        self._undo = wrap_training_step(pl_module, self._step)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._put_back()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._put_back()
        self._network = None

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._put_back()
        self._network = None

    def _does_something(self) -> bool:
        return self.weight > 0 or (bool(self.features) and self.feature_weight > 0)

    def _step(self, module: pl.LightningModule, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What ``step`` returns, with the teacher's part in its loss."""
        assert self._watched is not None
        versions = {id(leaf): leaf._version for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        with self._watched.watching() as calls:
            output = step(*args, **kwargs)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor):
            return output  # a step that is left out, or one that Lightning has a message for
        check_calls(calls, versions, type(module).__name__)
        soft, hints = zip(*(self._terms(call) for call in calls), strict=True)
        if self.weight > 0:
            softened = torch.stack(soft).mean()
            loss = (1 - self.weight) * loss + self.weight * softened
            if not module.trainer.barebones:
                module.log("distillation_loss", softened.detach())
        if self.features:
            loss = loss + self.feature_weight * torch.stack(hints).mean()
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    def _terms(self, call: NetworkCall) -> tuple[Tensor, Tensor]:
        assert self._teacher is not None
        answer, kept = self._teacher(call.args, call.kwargs)
        student = self.logits(call.output)
        soft = torch.zeros((), device=student.device)
        if self.weight > 0:
            soft = distillation_loss(student, self.logits(answer), self.temperature, self.class_dim)
        hint = torch.zeros((), device=student.device)
        for own, other in self.features.items():
            hint = hint + _squared_difference(own, call.features.get(own), kept.get(other))
        return soft, hint

    def _put_back(self) -> None:
        if self._undo is not None:
            self._undo()
        if self._watched is not None:
            self._watched.remove()
        if self._teacher is not None:
            self._teacher.give_back()
        self._undo = self._watched = self._teacher = None


def _squared_difference(name: str, student: Any, teacher: Any) -> Tensor:
    if not (isinstance(student, Tensor) and isinstance(teacher, Tensor)):
        raise ValueError(f"features: {name!r}, or its counterpart, was not called or does not answer with a tensor.")
    if student.shape != teacher.shape:
        raise ValueError(
            f"features: {name!r} has shape {tuple(student.shape)} and its counterpart {tuple(teacher.shape)}; choose "
            "modules whose outputs have the same shape."
        )
    return (student.float() - teacher.detach().float()).square().mean()


def _check_number(name: str, value: Any, allowed: Callable[[float], bool], told: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}.")
    if not allowed(value):
        raise ValueError(f"{name}={value!r} is not allowed; it is {told}.")

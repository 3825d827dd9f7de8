"""The running average of a model's weights, over plain torch modules.

What is averaged: the parameters that are trained, and the running mean and variance of normalisation layers. Every
other buffer (counters, masks, positions, scales) stays the model's own: the average of a mask is no mask, and of an
attention mask of ``-inf`` it is NaN.

Tensors are paired by name, so a model whose parameters change their order or their names while it trains, as pruning
by ``torch.nn.utils.prune`` does, keeps its average. Weights of 16 bits are averaged in float32: at a decay of 0.999 a
step is smaller than what bfloat16 can tell apart, and such an average would stand still.

Sources: Polyak and Juditsky 1992 and Izmailov et al. 2018 (arXiv 1803.05407) for the equal average; the shorter memory
at the start is that of ``tf.train.ExponentialMovingAverage``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_speedkit.errors import did_you_mean
from lightning_speedkit.optimize.optimizer_options import checked_flag, checked_number

__all__ = ["WeightAverage", "check_device"]

_HALVES = (torch.float16, torch.bfloat16)


class WeightAverage:
    """An average of the weights that a module had at each :meth:`update`; usable in a loop of your own.

    The first update takes the weights as they are. Nothing is read from the device, and no copy of the module is made.

    Args:
        by: ``"ema"`` keeps ``decay`` of the average at each update; ``"swa"`` weighs all updates alike.
        decay: Of ``"ema"``, from 0 (the average is the last update) up to, and without, 1; 0.999 if not given.
        warmup: Of ``"ema"``: update ``n`` (from 0) keeps at most ``(1 + n) / (10 + n)``, so that the first weights are
            soon forgotten; so it is if not given.
        device: Where the average is kept, ``"cpu"`` say; ``None`` keeps each tensor beside its parameter.

    Raises:
        ValueError: ``by`` is unknown, or ``decay`` is outside its range.
        TypeError: ``decay`` is no number, or ``warmup`` no truth value.

    Example:

        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> average = WeightAverage("swa")
        >>> for value in (1.0, 2.0, 6.0):
        ...     _ = torch.nn.init.constant_(model.weight, value)
        ...     average.update(model)
        >>> with average.applied_to(model):
        ...     model.weight.item()
        3.0
        >>> model.weight.item()
        6.0
    """

    def __init__(
        self,
        by: str = "ema",
        decay: float | None = None,
        warmup: bool | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if by not in ("ema", "swa"):
            hint = did_you_mean(by, ("ema", "swa")) if isinstance(by, str) else f" For the decay write decay={by!r}."
            raise ValueError(
                f"by={by!r} is unknown; use 'ema' (exponential moving average) or 'swa' (all updates weigh alike)."
                f"{hint}"
            )
        for name, given in (("decay", decay), ("warmup", warmup)):
            if by == "swa" and given is not None:
                raise ValueError(f"{name}={given!r} belongs to by='ema' and has no effect with 'swa'. Leave it out.")
        self.by = by
        self.decay = 0.999 if decay is None else checked_number("decay", decay, 0, 1)
        if self.decay == 1:
            raise ValueError(f"decay={decay!r} is not allowed; it is at least 0 and less than 1, and often 0.999.")
        self.warmup = True if warmup is None else checked_flag("warmup", warmup)
        self.device = None if device is None else _device(device)
        self.updates = 0
        self._values: dict[str, Tensor] = {}
        self._live: dict[str, Tensor] | None = None  # what the module trains with, while it has the average
        self._wide: set[str] = set()

    @property
    def in_use(self) -> bool:
        """Whether the module has the average in the place of its own weights."""
        return self._live is not None

    def weight_at(self, update: int) -> float:
        """What the weights of that update (from 0) count for in the average after it.

        >>> average = WeightAverage("ema", decay=0.9)
        >>> [round(average.weight_at(update), 3) for update in (0, 1, 2, 1000)]
        [1.0, 0.818, 0.75, 0.1]
        """
        if update == 0:
            return 1.0
        if self.by == "swa":
            return 1.0 / (update + 1)
        return 1.0 - (min(self.decay, (1 + update) / (10 + update)) if self.warmup else self.decay)

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        """Take the weights that the module has now into the average."""
        if self.in_use:
            raise RuntimeError("The module has the average in place of its weights: put_back() first.")
        live = self._paired(module)
        weight = self.weight_at(self.updates)
        average = [self._values[name] for name in live]
        if average and weight:
            torch._foreach_lerp_(average, [t.to(a) for a, t in zip(average, live.values(), strict=True)], weight)
        self.updates += 1

    @torch.no_grad()
    def use(self, module: nn.Module) -> None:
        """Put the average into the module, and keep its own weights until :meth:`put_back`.

        Does nothing before the first update, or if the average is there already.
        """
        if self.in_use or not self.updates:
            return
        with torch.inference_mode(False):  # validation runs in it, and what it makes cannot be changed later
            live = self._paired(module)
            self._live = {name: tensor.detach().clone() for name, tensor in live.items()}
            for name, tensor in live.items():
                tensor.data.copy_(self._values[name])

    @torch.no_grad()
    def put_back(self, module: nn.Module) -> None:
        """Give the module its own weights back, to the last bit; does nothing if it has them."""
        if self._live is None:
            return
        kept, self._live = self._live, None
        with torch.inference_mode(False):
            tracked = _tensors(module)
            _rename(kept, tracked)
            for name, value in kept.items():
                if name in tracked and tracked[name].shape == value.shape:
                    tracked[name].data.copy_(value)

    @contextmanager
    def applied_to(self, module: nn.Module) -> Iterator[None]:
        """The module has the average inside the ``with``, and its own weights after it, whatever happens there."""
        self.use(module)
        try:
            yield
        finally:
            self.put_back(module)

    @torch.no_grad()
    def split_state(
        self, module: nn.Module, state: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """From a ``state_dict`` of the module: the one to go on training from, and the one of the average.

        Right whether the module has its own weights or the average. If masks of pruning were multiplied into the
        weights of ``state`` already, so they are in both.
        """
        tracked = _tensors(module)
        other = dict(self._values if self._live is None else self._live)
        _rename(other, tracked)
        masks = dict(module.named_buffers())
        replaced = dict(state)
        for name, first in _all_names(module, tracked).items():
            short = name.removesuffix("_orig")
            if first not in other:
                continue
            if name in state:
                replaced[name] = other[first].to(state[name])
            elif short in state:
                mask = masks[f"{first.removesuffix('_orig')}_mask"]
                replaced[short] = (other[first] * mask.to(other[first])).to(state[short])
        return (dict(state), replaced) if self._live is None else (replaced, dict(state))

    @torch.no_grad()
    def load(self, module: nn.Module, values: Mapping[str, Tensor], updates: int, names: Iterable[str] = ()) -> None:
        """Go on from an average of that many updates.

        Of ``values``, which may be a whole ``state_dict``, it takes what it would track in the module, and ``names``.
        """
        self._live, self.updates = None, updates
        tracked = {name: tensor for name, tensor in _tensors(module, names).items() if name in values}
        self._values = {name: self._kept(values[name], like=tensor) for name, tensor in tracked.items()}
        self._wide = _half(tracked)

    def names(self) -> list[str]:
        """The names of what is averaged."""
        return list(self._values)

    def widened(self) -> dict[str, Tensor]:
        """The averages that are kept in float32 since their weights have 16 bits: a ``state_dict`` rounds them."""
        return {name: value for name, value in self._values.items() if name in self._wide}

    def move(self, device: torch.device | str) -> None:
        """Keep the average, and the weights that the module had before it, on another device."""
        self._values = {name: value.to(device) for name, value in self._values.items()}
        if self._live is not None:
            self._live = {name: value.to(device) for name, value in self._live.items()}

    def _paired(self, module: nn.Module) -> dict[str, Tensor]:
        """The tensors of the module to average, by name, each with a partner of its shape in the average."""
        tracked = _tensors(module, self._values)
        _rename(self._values, tracked)
        kept = {}
        for name, tensor in tracked.items():
            value = self._values.get(name)
            new = value is None or value.shape != tensor.shape
            kept[name] = self._kept(tensor if new or value is None else value, like=tensor, copy=new)
        self._values = kept
        self._wide = _half(tracked)
        return tracked

    def _kept(self, value: Tensor, like: Tensor, copy: bool = True) -> Tensor:
        dtype = torch.float32 if like.dtype in _HALVES else like.dtype
        return value.detach().to(self.device or like.device, dtype, copy=copy)


def check_device(device: torch.device | None) -> None:
    """Raise if nothing can be kept on this device.

    Raises:
        ValueError: It is not here, or has no memory.

    >>> check_device(torch.device("cpu"))
    """
    if device is None:
        return
    try:
        torch.empty(1, device=device).cpu()
    except (RuntimeError, AssertionError, ImportError, NotImplementedError) as error:  # torch has one for each kind
        raise ValueError(
            f"device={str(device)!r} is not here, or keeps nothing ({str(error).splitlines()[0]}). Use 'cpu', or leave "
            "it out: then the average is where the weights are."
        ) from error


def _device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        gpu = " A GPU is 'cuda' in torch, or 'mps' or 'xpu'." if str(device).startswith("gpu") else ""
        raise ValueError(f"device={device!r} is no device of torch, such as 'cpu' or 'cuda:0'.{gpu}") from error


def _half(tracked: Mapping[str, Tensor]) -> set[str]:
    return {name for name, tensor in tracked.items() if tensor.dtype in _HALVES}


def _tensors(module: nn.Module, known: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Parameters and running statistics by name, each once; of the parameters, the trained ones and the known ones."""
    names = None if known is None else {*known}
    found: dict[str, Tensor] = {
        name: parameter
        for name, parameter in module.named_parameters()
        if names is None or parameter.requires_grad or name in names
    }
    for path, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._NormBase):
            for name in ("running_mean", "running_var"):
                if isinstance(statistic := getattr(part, name), Tensor):
                    found[f"{path}.{name}" if path else name] = statistic
    return found


def _rename(values: dict[str, Tensor], tracked: Mapping[str, Tensor]) -> None:
    """Follow ``torch.nn.utils.prune``, which makes ``weight_orig`` and a mask of ``weight``, and ``weight`` of both."""
    for name in tracked.keys() - values.keys():
        short, long = name.removesuffix("_orig"), f"{name}_orig"
        if short != name and short in values:
            values[name] = values.pop(short)
        elif long in values and long not in tracked:
            value = values.pop(long)
            values[name] = value * (tracked[name] != 0).to(value)  # what the mask set to 0 stays 0


def _all_names(module: nn.Module, tracked: Mapping[str, Tensor]) -> dict[str, str]:
    """Every name of each tracked tensor, with its first one: shared parameters have several in a ``state_dict``."""
    first = {id(tensor): name for name, tensor in tracked.items()}
    shared = {name: first[id(p)] for name, p in module.named_parameters(remove_duplicate=False) if id(p) in first}
    return {**{name: name for name in tracked}, **shared}

"""``torch.ao.quantization`` behind one file.

That package still computes int8 fastest on a CPU, and its removal is proposed upstream (pytorch/ao #2259), so nothing
else of the kit imports it, it is looked for when it is used, and its deprecation warnings are filtered around each
call only.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from lightning_speedkit.errors import QuantizationError

__all__ = [
    "CONVOLUTIONS",
    "DYNAMIC_LAYERS",
    "RECURRENT_LAYERS",
    "convert_static",
    "dynamic_layer",
    "dynamic_refusal",
    "has_torch_ao",
    "is_quantized",
    "load_recurrent_weights",
    "observe_static",
    "quantization_numbers",
    "quantized_engine",
    "quiet",
    "recurrent_weights",
    "static_refusal",
    "unobserved",
]

CONVOLUTIONS: tuple[type[nn.Module], ...] = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
RECURRENT_LAYERS: tuple[type[nn.Module], ...] = (nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell, nn.RNNCell)
# their weight, which may be shared, would be packed into an object that no state_dict holds
_FUNCTIONS_WITH_WEIGHT = (
    nn.functional.linear,
    nn.functional.conv1d,
    nn.functional.conv2d,
    nn.functional.conv3d,
    nn.functional.conv_transpose1d,
    nn.functional.conv_transpose2d,
    nn.functional.conv_transpose3d,
)
DYNAMIC_LAYERS: tuple[type[nn.Module], ...] = (nn.Linear, *RECURRENT_LAYERS)


@contextmanager
def quiet() -> Iterator[None]:
    """Filters the deprecation and per-tensor advice of torch's quantization inside the block, and nowhere else."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\..*")
        yield


def quantized_engine() -> str:
    """The engine that torch runs int8 with here: the one the user chose, or torch's own choice for this CPU."""
    engine = str(torch.backends.quantized.engine)
    if engine == "none":
        raise QuantizationError("This build of torch has no quantized engine, so nothing can be run in int8 here.")
    return engine


def has_torch_ao() -> bool:
    """Whether this torch still has ``torch.ao.quantization`` with its tracing part."""
    return _spec("torch.ao.quantization.quantize_fx") is not None


def _spec(name: str) -> Any:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None


def _quantization(module: str) -> Any:
    name = f"torch.ao.quantization{module}"
    if _spec(name) is None:
        raise QuantizationError(f"{name} is gone from torch {torch.__version__}; use an older torch to quantize.")
    with quiet():
        return importlib.import_module(name)


def observe_static(module: nn.Module, *, engine: str, skip: Sequence[str] = ()) -> torch.fx.GraphModule:
    """Trace ``module`` by torch.fx, fuse what can be fused, and put an observer at every int8 boundary.

    ``skip`` names modules inside it that stay in float. The default settings of the x86 engines keep activations to
    7 bits, so AVX2's saturating multiply-add cannot overflow.
    """
    mapping = _quantization("").get_default_qconfig_mapping(engine)
    for name, layer in module.named_modules():
        if isinstance(layer, _InstanceNorm) and layer.track_running_stats:
            raise QuantizationError(f"torch's int8 InstanceNorm would not look at the running statistics of {name!r}")
    for name in skip:
        mapping.set_module_name(name, None)
    mapping.set_object_type(nn.PReLU, None)  # torch's int8 PReLU gives other values
    for function in _FUNCTIONS_WITH_WEIGHT:
        mapping.set_object_type(function, None)
    with quiet():
        prepared = _quantization(".quantize_fx").prepare_fx(module, mapping, (torch.zeros(1),))
    _forget_models()
    return cast("torch.fx.GraphModule", prepared)


def static_refusal(layer: nn.Module, engine: str) -> str | None:
    """Why a convolution cannot run in int8 on ``engine``, or ``None`` if it can; ``None`` for any other layer."""
    if not isinstance(layer, _ConvNd):
        return None
    if layer.padding_mode not in (("zeros",) if isinstance(layer, nn.Conv3d) else ("zeros", "reflect")):
        return f"padding_mode={layer.padding_mode!r} has no int8 version"
    if isinstance(layer.padding, str):
        return f"padding={layer.padding!r} that is larger on one side has no int8 version"
    if engine == "qnnpack" and isinstance(layer, (nn.Conv3d, nn.ConvTranspose3d)):
        return "the engine 'qnnpack' cannot save a convolution of three dimensions"
    if layer.transposed and engine in ("x86", "onednn") and layer.in_channels != layer.out_channels:
        # measured on torch 2.13: the results are as wrong as random numbers
        return f"the engine {engine!r} computes a transposed convolution wrongly where the channels change"
    return None


def unobserved(prepared: nn.Module) -> list[str]:
    """The names of the observers that have seen no value, without those whose range is fixed by the operation."""
    base: Any = _quantization(".observer").UniformQuantizationObserverBase
    return [
        name
        for name, module in prepared.named_modules()
        if isinstance(module, base) and hasattr(module, "min_val") and not _has_range(cast("Any", module))
    ]


def _has_range(observer: Any) -> bool:
    low: Tensor = observer.min_val
    return low.numel() > 0 and bool(torch.isfinite(low).all())


def convert_static(prepared: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The int8 graph of what :func:`observe_static` returned; ``prepared`` is used up."""
    with quiet():
        converted = cast("torch.fx.GraphModule", _quantization(".quantize_fx").convert_fx(prepared))
    _forget_models()
    return converted


def _forget_models() -> None:
    """Empty a cache of torch that would keep each model, prepared and converted, as long as the process lives."""
    cached: Any = getattr(_quantization(".fx.utils"), "assert_and_get_unique_device", None)
    if hasattr(cached, "cache_clear"):
        cached.cache_clear()


def dynamic_refusal(layer: nn.Module) -> str | None:
    """Why ``layer`` cannot become a dynamic int8 layer, or ``None`` if it can."""
    if type(layer) not in DYNAMIC_LAYERS:
        return f"{type(layer).__name__} has no dynamic int8 version"
    if isinstance(layer, RECURRENT_LAYERS) and not getattr(layer, "bias", True):
        return f"{type(layer).__name__} without bias has no int8 version"
    if getattr(layer, "proj_size", 0):
        return f"{type(layer).__name__} with proj_size has no int8 version"
    if any(size == 0 for weight in layer.parameters() for size in weight.shape):
        return "it has an empty weight"
    return None


def dynamic_layer(layer: nn.Module) -> nn.Module:
    """An int8 version of one Linear or recurrent layer that measures the range of its input at every call."""
    with quiet():
        holder = _quantization("").quantize_dynamic(nn.Sequential(layer), {type(layer)}, dtype=torch.qint8)
    quantized = cast("nn.Module", holder[0])
    if not is_quantized(quantized):
        raise QuantizationError(f"torch {torch.__version__} has no dynamic int8 version of {type(layer).__name__}.")
    return quantized


def is_quantized(module: nn.Module) -> bool:
    """Whether ``module`` is itself one of torch's int8 layers."""
    return ".quantized" in type(module).__module__ and type(module).__module__.startswith("torch.ao.nn.")


def quantization_numbers(layer: nn.Module) -> dict[str, float]:
    """The scale and zero point of the output of an int8 layer, where it keeps them as plain numbers."""
    if not is_quantized(layer):
        return {}
    return {key: vars(layer)[key] for key in ("scale", "zero_point") if isinstance(vars(layer).get(key), (int, float))}


def recurrent_weights(layer: nn.Module) -> dict[str, Tensor] | None:
    """Weights and biases of an int8 recurrent layer as tensors, or ``None`` if it is no such layer.

    Its ``state_dict`` holds script objects, which ``torch.load(weights_only=True)`` refuses.
    """
    if not (is_quantized(layer) and hasattr(layer, "set_weight_bias") and hasattr(layer, "get_weight")):
        return None
    return {**cast("Any", layer).get_weight(), **cast("Any", layer).get_bias()}


def load_recurrent_weights(layer: nn.Module, weights: dict[str, Tensor]) -> None:
    """Put what :func:`recurrent_weights` returned into an int8 layer of the same shape."""
    into: Any = layer
    if "weight_ih" in weights:  # a cell, whose own set_weight_bias looks for keys that its getters never write
        pack = torch.ops.quantized.linear_prepack
        into._packed_weight_ih = pack(weights["weight_ih"], weights["bias_ih"])
        into._packed_weight_hh = pack(weights["weight_hh"], weights["bias_hh"])
    else:
        into.set_weight_bias(weights)

"""What a checkpointed module does with its activations, by name: recompute all, keep some outputs, or move them out.

``"full"`` keeps nothing but the inputs. ``"selective"`` also keeps the outputs of the expensive operations, so that
only the cheap ones (dropout, normalization, activation functions, additions) are computed again. ``"offload"`` computes
nothing again: what the backward needs waits in host memory.

Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022 (selective); Ren et al.,
ZeRO-Offload, 2021 (host memory).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_speedkit.errors import did_you_mean

__all__ = ["Offload", "Policy", "Recompute", "checked_policy"]

# A class stands for the forms that one computation has on the devices; "attention" for the fused kernels.
_CLASSES = {
    "matmul": ("aten.mm", "aten.addmm", "aten.mv", "aten.addmv", "aten.linear", "aten._scaled_mm", "aten._int_mm"),
    "batched-matmul": ("aten.bmm", "aten.baddbmm"),
    "attention": (
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_fused_attention_overrideable",
        "aten._flash_attention_forward",
        "aten._efficient_attention_forward",
    ),
    "convolution": ("aten.convolution",),
}
_KEEP = ("matmul", "attention", "convolution")
_MIN_BYTES = 1 << 20
_POLICIES = ("full", "selective", "offload")


@dataclass(frozen=True)
class Recompute:
    """Compute everything again, but for the outputs of the operations in ``keep``."""

    keep: frozenset[Any] = frozenset()


@dataclass(frozen=True)
class Offload:
    """Keep saved tensors of at least ``min_bytes`` in host memory until the backward."""

    min_bytes: int = _MIN_BYTES


Policy = Recompute | Offload


def checked_policy(policy: str = "full", keep: Sequence[str] | None = None, min_bytes: int | None = None) -> Policy:
    """The policy of a name and its options, or what is wrong with them.

    Args:
        policy: ``"full"``, ``"selective"`` or ``"offload"``.
        keep: Of ``"selective"``: classes of operations (``"matmul"``, ``"batched-matmul"``, ``"attention"``,
            ``"convolution"``), or single ones such as ``"aten._softmax"``. If not given: all but ``"batched-matmul"``.
        min_bytes: Of ``"offload"``: smaller tensors stay on the device; 1 MiB if not given.

    Raises:
        ValueError: If a name is unknown, an operation cannot be kept, or an option belongs to another policy.
        TypeError: If an option has the wrong type.

    >>> checked_policy("offload", min_bytes=4096)
    Offload(min_bytes=4096)
    >>> torch.ops.aten.mm.default in checked_policy("selective", keep=["matmul"]).keep
    True
    """
    if not isinstance(policy, str) or policy not in _POLICIES:
        raise ValueError(f"policy={policy!r} is not one of {', '.join(map(repr, _POLICIES))}.")
    if keep is not None and policy != "selective":
        raise ValueError(f"keep={keep!r} is an option of policy='selective', got policy={policy!r}.")
    if min_bytes is not None and policy != "offload":
        raise ValueError(f"min_bytes={min_bytes!r} is an option of policy='offload', got policy={policy!r}.")
    if policy == "full":
        return Recompute()
    if policy == "selective":
        return Recompute(_operations(_KEEP if keep is None else keep))
    if min_bytes is None:
        return Offload()
    if isinstance(min_bytes, bool) or not isinstance(min_bytes, int):
        raise TypeError(f"min_bytes is a whole number of bytes, got {min_bytes!r}.")
    if min_bytes < 0:
        raise ValueError(f"min_bytes={min_bytes} must be 0 or more.")
    return Offload(min_bytes)


def _operations(keep: Sequence[str]) -> frozenset[Any]:
    if not isinstance(keep, (list, tuple)) or not all(isinstance(name, str) for name in keep):
        raise TypeError(f"keep is a list of names of operations, got {keep!r}.")
    if not keep:
        raise ValueError("keep=[] keeps nothing; that is policy='full'.")
    found: set[Any] = set()
    for name in keep:
        if name in _CLASSES:  # forms that this version of torch lacks are left out
            found.update(overload for form in _CLASSES[name] for overload in _overloads(form))
        else:
            found.update(_named(name))
    return frozenset(found)


def _named(name: str) -> list[Any]:
    found = _overloads(name)
    if not found:
        raise ValueError(
            f"keep: {name!r} is no class and no operation whose output can be kept."
            f"{did_you_mean(name, _CLASSES, most=1)} The classes are {', '.join(map(repr, _CLASSES))}; an "
            f"operation is named as in torch.ops ('aten._softmax'), and one that writes to its input cannot be kept."
        )
    if name == "aten._to_copy":
        raise ValueError("keep: 'aten._to_copy' cannot be kept: autocast skips some of them in the recomputation.")
    decomposes: Any = torch._C._dispatch_has_kernel_for_dispatch_key
    if all(decomposes(overload.name(), "CompositeImplicitAutograd") for overload in found):
        raise ValueError(
            f"keep: {name!r} is made of other operations before its output could be kept. Name those: a "
            f"torch.profiler trace shows them."
        )
    return found


def _overloads(name: str) -> list[Any]:
    """The forms of an operation that return new tensors: none that writes to, or returns a view of, its inputs."""
    space, _, rest = name.partition(".")
    packet: Any = getattr(getattr(torch.ops, space, None), rest, None) if rest.isidentifier() else None
    overloads = [getattr(packet, one) for one in packet.overloads()] if hasattr(packet, "overloads") else []
    return [one for one in overloads if not any(of.alias_info for of in (*one._schema.arguments, *one._schema.returns))]

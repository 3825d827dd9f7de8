"""Attention whose heads can be removed: finds their rows and columns, and keeps the number of heads right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

__all__ = ["Attention", "attention_layouts", "fit_heads"]

_COUNTS = ("num_heads", "n_heads", "n_head", "nhead", "heads", "num_attention_heads")
_WIDTHS = ("attn_dim", "inner_dim", "all_head_size")
_FUSED = ("qkv", "to_qkv", "qkv_proj", "in_proj", "c_attn", "Wqkv", "wqkv")
_SEPARATE = (
    ("q", "k", "v"), ("q_proj", "k_proj", "v_proj"), ("to_q", "to_k", "to_v"), ("wq", "wk", "wv"),
    ("Wq", "Wk", "Wv"), ("query", "key", "value"), ("q_lin", "k_lin", "v_lin"),
)  # fmt: skip
_OUTPUTS = ("proj", "out_proj", "o_proj", "c_proj", "out", "to_out", "wo", "Wo", "o", "dense", "out_lin")


@dataclass(frozen=True, slots=True)
class Attention:
    """An attention module with plain Linear layers inside: ``inputs`` make queries, keys and values, ``output`` reads.

    ``count`` is the attribute that holds the number of heads, ``size`` the width of one head. With one layer in
    ``inputs``, its rows are all queries, then all keys, then all values.
    """

    inputs: tuple[str, ...]
    output: str
    count: str
    heads: int
    size: int

    def rows(self, head: int) -> Iterator[int]:
        """The rows of each of ``inputs`` that make this head."""
        for block in range(3 if len(self.inputs) == 1 else 1):
            start = (block * self.heads + head) * self.size
            yield from range(start, start + self.size)

    def columns(self, head: int) -> range:
        """The columns of ``output`` that read this head."""
        return range(head * self.size, (head + 1) * self.size)


def attention_layouts(root: nn.Module) -> dict[str, Attention]:
    """The attention modules in ``root`` whose layers are known by their usual names and fit together, by name.

    ``nn.MultiheadAttention`` is none: it ties the number of its heads to its width.
    """
    found = {}
    for name, module in root.named_modules():
        layout = None if isinstance(module, nn.MultiheadAttention) else _layout(module)
        if layout is not None:
            found[name] = layout
    return found


def fit_heads(root: nn.Module, before: Mapping[str, Attention]) -> None:
    """Sets the number of heads to what the layers hold now; ``before`` is what they held before they were cut."""
    for name, layout in before.items():
        module = root.get_submodule(name)
        rows = _linear(module, layout.inputs[0])
        heads = 0 if rows is None else rows.out_features // (layout.size * (3 if len(layout.inputs) == 1 else 1))
        if heads in (0, layout.heads):
            continue
        setattr(module, layout.count, heads)
        for width in _WIDTHS:
            if getattr(module, width, None) == layout.heads * layout.size:
                setattr(module, width, heads * layout.size)


def _layout(module: nn.Module) -> Attention | None:
    count = next((name for name in _COUNTS if isinstance(getattr(module, name, None), int)), None)
    output = next((name for name in _OUTPUTS if _linear(module, name) is not None), None)
    if count is None or output is None:
        return None
    heads, reader = int(getattr(module, count)), _linear(module, output)
    if reader is None or heads < 1 or reader.in_features % heads:
        return None
    width = reader.in_features
    for fused in _FUSED:
        layer = _linear(module, fused)
        if layer is not None and layer.out_features == 3 * width:
            return Attention((fused,), output, count, heads, width // heads)
    for names in _SEPARATE:
        layers = [_linear(module, name) for name in names]
        if all(layer is not None and layer.out_features == width for layer in layers):
            return Attention(names, output, count, heads, width // heads)
    return None


def _linear(module: nn.Module, name: str) -> nn.Linear | None:
    layer = module._modules.get(name)
    return layer if isinstance(layer, nn.Linear) else None

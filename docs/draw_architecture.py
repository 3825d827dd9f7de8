"""Draws docs/architecture.svg, the map of the layers, from the layer contract in pyproject.toml.

python docs/draw_architecture.py
"""

from __future__ import annotations

import html
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parent.parent
WIDTH, ROW, GAP, MARGIN = 960, 74, 14, 20

WORDS = {
    "__main__": "python -m lightning_speedkit",
    "cli": "the speedkit command, SpeedkitCLI",
    "demo": "the main job on real data",
    "presets": "techniques by name: merge, precedence, snippets",
    "data": "LMDB, DataModules",
    "precision": "mixed precision",
    "optimize": "exact accumulation",
    "memory": "checkpointing",
    "compress": "quantize, prune",
    "architecture": "lighter networks",
    "parallel": "DDP strategies",
    "measure": "clocks and probes → facts",
    "registry": "presets as data",
    "facts": "what was measured, plain data",
    "report": "one HTML file or the terminal",
    "errors": "every error, one tree",
    "version": "the version",
}


def draw(layers: list[list[str]]) -> str:
    """The picture as SVG: one row a layer, one box a package, the top row first."""
    height = MARGIN * 2 + len(layers) * (ROW + GAP) - GAP + 36
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'font-family="system-ui, sans-serif">',
        "<title>The layers of lightning_speedkit, each importing only from those below it</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for row, names in enumerate(layers):
        y = MARGIN + row * (ROW + GAP)
        width = (WIDTH - 2 * MARGIN - GAP * (len(names) - 1)) / len(names)
        for column, name in enumerate(names):
            x = MARGIN + column * (width + GAP)
            middle = x + width / 2
            small, large = (11, 14) if len(names) > 4 else (13, 16)
            parts += [
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW}" rx="8" '
                'fill="#eef4fb" stroke="#2f6fb3"/>',
                f'<text x="{middle:.1f}" y="{y + 30}" text-anchor="middle" font-size="{large}" font-weight="600" '
                f'fill="#123">{html.escape(name)}</text>',
                f'<text x="{middle:.1f}" y="{y + 53}" text-anchor="middle" font-size="{small}" '
                f'fill="#456">{html.escape(WORDS.get(name, ""))}</text>',
            ]
    y = height - 22
    parts.append(
        f'<text x="{MARGIN}" y="{y}" font-size="13" fill="#456">A package imports from the rows below it, '
        "never sideways in the row of the techniques. import-linter checks it.</text>"
    )
    return "\n".join([*parts, "</svg>", ""])


def layers() -> list[list[str]]:
    """The layers as the contract in pyproject.toml has them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = next(c for c in settings["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    return [[name.strip() for name in row.split("|")] for row in contract["layers"]]


if __name__ == "__main__":
    (ROOT / "docs" / "architecture.svg").write_text(draw(layers()), encoding="utf-8")

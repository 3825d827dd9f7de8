"""The Python, YAML and shell blocks of README and docs are executed, each page in one namespace and folder.

A block under ``<!-- not run: reason -->`` is left out; the reason says why a reader's machine is needed for it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(?P<mark><!-- not run: [^>]+ -->\n)?^```python\n(?P<code>.*?)^```", re.M | re.S)


def _blocks(page: Path) -> list[tuple[int, str]]:
    text = page.read_text(encoding="utf-8")
    found = [m for m in BLOCK.finditer(text) if not m.group("mark")]
    return [(text[: m.start("code")].count("\n") + 1, m.group("code")) for m in found]


@pytest.mark.parametrize("page", [p for p in PAGES if _blocks(p)], ids=lambda p: p.relative_to(ROOT).as_posix())
def test_python_of_the_page_runs(page: Path, tmp_path: Path) -> None:
    namespace: dict[str, object] = {"__name__": "__main__"}
    for line, code in _blocks(page):
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), namespace)


def test_the_readme_has_blocks_that_run() -> None:
    assert len(_blocks(ROOT / "README.md")) >= 3

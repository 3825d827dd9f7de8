"""Layers, names of modules, and what the project may say."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "lightning_speedkit"
FORBIDDEN = {"utils", "util", "helpers", "common", "misc", "base", "manager", "core", "handler", "handlers"}
MODULES = sorted(PACKAGE.rglob("*.py"))


def test_layer_contracts_hold() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([str(lint), "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert [m for m in MODULES if m.stem in FORBIDDEN or m.parent.name in FORBIDDEN] == []


@pytest.mark.parametrize("module", MODULES, ids=lambda m: str(m.relative_to(PACKAGE)))
def test_module_reads_as_agreed(module: Path) -> None:
    tree = ast.parse(module.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), "a module says in its docstring what it is for"
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = {alias.name for alias in node.names}
            assert node.module != "lightning_speedkit" or names <= {"presets", "data"}, "import from the module itself"
        overrides = isinstance(node, ast.FunctionDef) and any("override" in ast.dump(d) for d in node.decorator_list)
        if isinstance(node, ast.FunctionDef) and node.args.kwarg is not None and not overrides:
            assert node.name == "trainer_kwargs", f"{node.name} forwards **{node.args.kwarg.arg}"
        if isinstance(node, ast.Assert):
            # assert is for our own invariants, which carry no message for a user
            assert node.msg is None, f"line {node.lineno}: an error for a user must be raised"


@pytest.mark.parametrize("module", MODULES, ids=lambda m: str(m.relative_to(PACKAGE)))
def test_module_has_its_tests(module: Path) -> None:
    relative = module.relative_to(PACKAGE)
    if relative.stem.startswith("__") or relative.stem == "presets" or len(relative.parts) < 2:
        return
    parent = Path("efficient") if relative.parent == Path("architecture") else relative.parent  # this folder's name
    mirror = ROOT / "tests" / parent / f"test_{relative.stem}.py"
    assert mirror.exists(), f"{mirror.relative_to(ROOT)} is missing"


def test_the_top_level_is_complete() -> None:
    for name in (
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
        "NOTICE",
        ".ci/run",
        "docs",
        "examples",
        "benchmarks",
        "tests",
    ):
        assert (ROOT / name).exists(), name


def test_every_method_card_is_linked_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    cards = sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "docs" / "methods").glob("*.md"))
    assert [card for card in cards if card not in readme] == []


def test_links_inside_the_project_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
            if "://" not in target and not target.startswith("mailto:"):
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"

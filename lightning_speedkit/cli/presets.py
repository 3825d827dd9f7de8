"""``speedkit presets [NAME ...]``: what presets there are, and what a selection of them sets here."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

__all__ = ["add_parser"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand to the ``speedkit`` parser."""
    parser = subparsers.add_parser(
        "presets",
        help="list the presets, or explain some",
        description=(
            "Without a name: every preset, and whether it can run on this machine. With one: what it needs and sets, "
            "as a Python line and as YAML. With several: what they set together."
        ),
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="a preset")
    parser.add_argument("--json", action="store_true", help="print JSON, for another program")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the list or the explanation."""
    if args.json:
        import json

        facts = _facts(args.names) if args.names else [_facts([name]) for name in _all_names()]
        print(json.dumps(facts, indent=2, default=str))
    elif args.names:
        _print_explanation(args.names)
    else:
        _print_list()
    return 0


def _all_names() -> tuple[str, ...]:
    from lightning_speedkit.presets import names

    return names()


def _facts(names: Sequence[str]) -> dict[str, Any]:
    """One selection as plain data."""
    from lightning_speedkit.presets import get
    from lightning_speedkit.presets.explain import explain
    from lightning_speedkit.presets.snippet import python_snippet, yaml_snippet
    from lightning_speedkit.registry import Part

    explanation = explain(names)
    presets = [get(name) for name in names]
    return {
        "names": list(names),
        "kinds": [preset.kind for preset in presets],
        "summaries": [preset.summary for preset in presets],
        "includes": list(dict.fromkeys(one for preset in presets for one in preset.includes)),
        "needs": list(explanation.needs),
        "runs_here": not explanation.missing,
        "missing": list(explanation.missing),
        "sets": [
            {
                "place": setting.place,
                "name": setting.name,
                "value": setting.value.config() if isinstance(setting.value, Part) else setting.value,
                "from": [origin.preset.name for origin in setting.origins],
            }
            for setting in explanation.settings
        ],
        "undecided": list(explanation.undecided),
        "python": python_snippet(names),
        "yaml": yaml_snippet(names),
    }


def _print_list() -> None:
    from lightning_speedkit.cli.terminal import print_table, print_title
    from lightning_speedkit.measure import read_hardware
    from lightning_speedkit.presets.catalogue import REGISTRY
    from lightning_speedkit.presets.selection import can_run

    hardware = read_hardware()
    print_title(f"This machine: {hardware.describe()}")
    rows: list[tuple[str, str, str, str]] = []
    for kind in dict.fromkeys(preset.kind for preset in REGISTRY):
        for preset in (preset for preset in REGISTRY if preset.kind == kind):
            missing = can_run(preset, hardware)
            runs = f"no: needs {' and '.join(missing)}" if missing else "yes"
            shown_kind = "" if rows and kind in {row[0] for row in rows} else kind
            rows.append((shown_kind, preset.name, runs, preset.summary))
    print_table(("kind", "preset", "runs here", "what it is"), rows)


def _print_explanation(names: Sequence[str]) -> None:
    from lightning_speedkit.cli.terminal import print_block, print_pairs
    from lightning_speedkit.presets import get
    from lightning_speedkit.presets.explain import explain
    from lightning_speedkit.presets.snippet import python_snippet, yaml_snippet

    explanation = explain(names)
    sets = [
        f"{setting.place} {setting.describe()}" + _origin([origin.preset.name for origin in setting.origins], names)
        for setting in explanation.settings
    ]
    sets += [f"what {name} chooses for that device" for name in explanation.undecided]
    pairs = [(f"{get(name).kind} preset", get(name).summary) for name in names]
    pairs += [
        ("needs", ", ".join(explanation.needs) or "nothing"),
        ("runs here", f"no: needs {' and '.join(explanation.missing)}" if explanation.missing else "yes"),
        ("sets", "\n".join(sets) or "nothing"),
    ]
    print_pairs(pairs, title=", ".join(names))
    print_block("In Python:", python_snippet(names))
    print_block("In the YAML of a SpeedkitCLI:", yaml_snippet(names))


def _origin(origins: list[str], names: Sequence[str]) -> str:
    """Says where a setting comes from, unless there is only one preset it could be."""
    return "" if list(names) == origins else f"  (from {', '.join(origins)})"

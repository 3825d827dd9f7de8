"""``speedkit verify PATH``: reads a whole LMDB store and compares all checksums."""

from __future__ import annotations

import argparse

__all__ = ["add_parser"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand to the ``speedkit`` parser."""
    parser = subparsers.add_parser(
        "verify",
        help="check an LMDB store from its first byte to its last",
        description=(
            "Reads a whole LMDB store and compares all its checksums. Exit code 0 if every byte is as it was written, "
            "1 with what is wrong if not."
        ),
    )
    parser.add_argument("path", metavar="PATH", help="a store, or a folder whose *.lmdb files are checked in turn")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the report of each store; the first fault is raised."""
    from dataclasses import fields
    from pathlib import Path

    from lightning_speedkit.cli.terminal import print_pairs
    from lightning_speedkit.data import verify_lmdb
    from lightning_speedkit.errors import StoreNotFoundError

    path = Path(args.path)
    stores = sorted(path.glob("*.lmdb")) if path.is_dir() else [path]
    if not stores:
        raise StoreNotFoundError(f"The folder {path} holds no *.lmdb file.")
    for store in stores:
        report = verify_lmdb(store)
        pairs = [(field.name.replace("_", " "), getattr(report, field.name)) for field in fields(report)]
        print_pairs([(name, _text(value)) for name, value in pairs], title=f"{store}: every checksum matches")
    return 0


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return "\n".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)

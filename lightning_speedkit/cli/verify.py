"""``speedkit verify PATH``: reads a whole LMDB store, or each one of a folder, and compares all checksums."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["add_parser"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand to the ``speedkit`` parser."""
    parser = subparsers.add_parser(
        "verify",
        help="check an LMDB store from its first byte to its last",
        description=(
            "Reads a whole LMDB store, compares all its checksums and decodes a sample of each block. Exit code 0 if "
            "every byte is as it was written, 1 with what is wrong if not. Of a folder every store is checked."
        ),
    )
    parser.add_argument("path", metavar="PATH", help="a store, or a folder whose *.lmdb files are checked in turn")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the report of each store. The fault of a single store is raised; of a folder all are told."""
    import os
    import sys

    from lightning_speedkit.errors import StoreError, StoreNotFoundError

    if not os.path.isdir(args.path):  # noqa: PTH112  # unlike Path.is_dir it also takes a name that is too long
        _check(Path(args.path))
        return 0
    stores = sorted(Path(args.path).glob("*.lmdb"))
    if not stores:
        raise StoreNotFoundError(f"The folder {args.path} holds no *.lmdb file.")
    faults = 0
    for store in stores:
        try:
            _check(store)
        except StoreError as error:
            if args.debug:
                raise
            faults += 1
            sys.stdout.flush()  # so that the two streams show the stores in one order
            print(f"speedkit verify: {error}", file=sys.stderr)
    return 1 if faults else 0


def _check(store: Path) -> None:
    from dataclasses import fields

    from lightning_speedkit.cli.terminal import print_pairs
    from lightning_speedkit.data import verify_lmdb

    report = verify_lmdb(store)
    pairs = [(field.name.replace("_", " "), getattr(report, field.name)) for field in fields(report)]
    print_pairs([(name, _text(value)) for name, value in pairs], title=f"{store}: every checksum matches")


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return "\n".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)

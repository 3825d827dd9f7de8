"""``speedkit demo``: before and after on real data, measured on this machine in about a minute."""

from __future__ import annotations

import argparse
import sys

__all__ = ["add_parser"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand to the ``speedkit`` parser."""
    parser = subparsers.add_parser(
        "demo",
        help="train on real data before and after, and write a report of what it measured",
        description=(
            "Trains a small network on 1,797 real handwritten digits the usual way and with the kit, quantizes it, "
            "prints what was measured on this machine, and writes report.html and results.json. Needs no network; "
            "temporary files are removed."
        ),
    )
    parser.add_argument("--out", default="speedkit-demo", metavar="DIR", help="folder for the report (%(default)s)")
    parser.add_argument("--seed", type=_seed, default=0, help="decides weights and order (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a few steps only; the numbers mean nothing then")
    parser.add_argument("--keep-files", action="store_true", help="keep images, stores and model in a folder in DIR")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the demo; 0 when it is done, 1 when the folder for the report cannot be used."""
    from lightning_speedkit.demo.run_demo import run_demo

    try:
        run_demo(args.out, quick=args.quick, seed=args.seed, keep_files=args.keep_files)
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        if args.debug:
            raise
        print(f"speedkit demo: --out {args.out} cannot be used: {error.strerror or error}.", file=sys.stderr)
        return 1
    return 0


def _seed(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**32:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 4294967295")
    return value

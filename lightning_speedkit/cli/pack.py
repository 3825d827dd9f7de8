"""``speedkit pack SOURCE OUT``: a dataset of any known format into a store, or into one store for each split."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from lightning_speedkit.cli.command_line import modules_of_this_folder, whole_number

if TYPE_CHECKING:
    from lightning_speedkit.data.sources import Source
    from lightning_speedkit.data.sources.parallel_pack import PackReport

__all__ = ["add_parser"]

_LISTED = 100
_LISTED_FILES = 5
_FORMATS = ("image-folder", "npy", "npz", "csv", "parquet", "webdataset", "tfrecord", "lmdb", "store", "python")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand to the ``speedkit`` parser."""
    parser = subparsers.add_parser(
        "pack",
        help="put a dataset into an LMDB store",
        description=(
            "Packs a dataset into a store. SOURCE is a folder with one sub-folder of pictures per class, a .npy, .npz, "
            ".csv, .tsv or .parquet file, WebDataset shards (a .tar file, a folder of them, or shards-{000..012}.tar), "
            "TFRecord files, an LMDB database of another program, a store, or module:function that yields samples. "
            "OUT is a file that ends with .lmdb, or a folder, which gets train.lmdb, or one store for each split. A "
            "folder with the sub-folders train, val and test is packed as these splits. What is there already is kept, "
            "unless --overwrite is given."
        ),
        epilog="for example: speedkit pack photographs/ data/ --split train=0.9,val=0.1",
    )
    parser.add_argument("source", metavar="SOURCE", help="where the samples are")
    parser.add_argument("out", metavar="OUT", help="a file that ends with .lmdb, or a folder")
    parser.add_argument(
        "--format", choices=_FORMATS, help="how to read SOURCE; found by its name and content if not given"
    )
    parser.add_argument("--split", metavar="FRACTIONS", help="divide the samples, as train=0.9,val=0.1 or 0.8,0.1,0.1")
    parser.add_argument(
        "--seed", type=whole_number(0), default=0, metavar="N", help="another N divides otherwise (%(default)s)"
    )
    count = whole_number(1)
    parser.add_argument("--limit", type=count, metavar="N", help="at most N samples (of each folder of a split)")
    parser.add_argument("--workers", type=count, metavar="N", help="threads that read; by default one per CPU core")
    parser.add_argument(
        "--columns", metavar="A,B:TYPE", help="what to read of a table, archive or record, in this order"
    )
    parser.add_argument("--trust-pickle", action="store_true", help="load pickles of an LMDB database: runs their code")
    parser.add_argument("--resize", type=count, metavar="N", help="make pictures smaller: N pixels at the shorter side")
    parser.add_argument("--encode", choices=("jpeg", "png"), help="encode pictures anew as this")
    parser.add_argument(
        "--quality", type=whole_number(1, 95), metavar="N", help="of JPEG that is encoded, 1 to 95 (90)"
    )
    checks = "how pictures are looked at: their ends (quick, the default), decoded (full), not at all (none)"
    parser.add_argument("--check", choices=("quick", "full", "none"), help=checks)
    parser.add_argument("--skip-bad", action="store_true", help="leave out samples that cannot be read, and list them")
    parser.add_argument("--overwrite", action="store_true", help="replace stores that are there")
    parser.add_argument("--quiet", action="store_true", help="no progress bar and no report, only faults")

    def call(args: argparse.Namespace) -> int:
        return run(args, parser.error)

    parser.set_defaults(run=call)


def run(args: argparse.Namespace, wrong: Callable[[str], NoReturn]) -> int:
    """Packs and reports. A fault of the source is raised, a wrong command line is told to ``wrong``."""
    _check_options(args, wrong)
    with modules_of_this_folder():
        return _run(args, wrong)


def _run(args: argparse.Namespace, wrong: Callable[[str], NoReturn]) -> int:
    from lightning_speedkit.data.sources.opening import classes_of, find_splits
    from lightning_speedkit.data.sources.split_choice import parse_fractions, splits_not_served

    try:
        fractions = parse_fractions(args.split) if args.split else {}
    except ValueError as error:
        wrong(f"--split: {error}")
    _check_out(args.out, wrong)
    splits = find_splits(args.source)
    one = args.out.endswith(".lmdb")
    if splits and args.split:
        wrong(
            f"--split: {args.source} has the splits {', '.join(splits)} already; pack one of its folders to divide it"
        )
    if one and (splits or fractions):
        wrong(f"OUT must be a folder for the splits {', '.join(splits or fractions)}, got {args.out}")
    out = Path(args.out)
    paths = {name: out / f"{name}.lmdb" for name in (splits or fractions or ["train"])}
    if one:
        paths = {"train": out}
    _check_free(list(paths.values()), args.overwrite)
    if fractions and not args.quiet and (note := splits_not_served(fractions)):
        print(f"speedkit pack: note: {note}", file=sys.stderr)
    if not splits:
        _pack(_opened(args, args.source, None, wrong), paths, fractions or {"train": 1.0}, args)
        return 0
    classes = classes_of(splits) if _is_image_folder(args, next(iter(splits.values()))) else None
    sources = {name: _opened(args, str(folder), classes, wrong) for name, folder in splits.items()}
    for name, source in sources.items():
        _pack(source, {name: paths[name]}, {name: 1.0}, args)
    return 0


def _pack(source: Source, paths: dict[str, Path], fractions: dict[str, float], args: argparse.Namespace) -> None:
    from lightning_speedkit.data.sources import ImageRecode
    from lightning_speedkit.data.sources.parallel_pack import SKIP_BAD, write_splits
    from lightning_speedkit.errors import SourceError, SpeedkitError

    recode = None
    if args.resize is not None or args.encode is not None:
        recode = ImageRecode(size=args.resize, encoding=args.encode, quality=args.quality or 90)
    try:
        report = write_splits(
            source, paths, fractions, seed=args.seed, transform=recode, workers=args.workers, limit=args.limit,
            skip_bad=args.skip_bad, progress=not args.quiet,
        )  # fmt: skip
    except SpeedkitError as error:
        if args.debug or SKIP_BAD not in getattr(error, "__notes__", ()):
            raise
        raise SourceError(f"{error} With --skip-bad such samples are left out and listed.") from error
    if report.skipped:
        _list_skipped(report)
    if not args.quiet:
        _print(report, source)


def _opened(
    args: argparse.Namespace, path: str, classes: tuple[str, ...] | None, wrong: Callable[[str], NoReturn]
) -> Source:
    from lightning_speedkit.data.sources import open_source

    check = args.check
    if args.resize is not None or args.encode is not None:
        check = "none"  # every picture is decoded
    try:
        return open_source(
            path, format=args.format, columns=args.columns, check=check, trust_pickle=args.trust_pickle, classes=classes
        )
    except ValueError as error:
        from lightning_speedkit.errors import SpeedkitError

        if isinstance(error, SpeedkitError):
            raise
        wrong(str(error))


def _is_image_folder(args: argparse.Namespace, folder: Path) -> bool:
    from lightning_speedkit.data.sources.detection import detect_format

    return (args.format or detect_format(str(folder))) == "image-folder"


def _check_options(args: argparse.Namespace, wrong: Callable[[str], NoReturn]) -> None:
    recodes = args.resize is not None or args.encode is not None
    if args.quality is not None and (not recodes or args.encode == "png"):
        wrong("--quality has no effect without --resize, or --encode jpeg")
    if args.check is not None and recodes:
        wrong("--check has no effect beside --resize and --encode, which decode every picture")
    if args.seed and not args.split:
        wrong("--seed has no effect without --split")


def _check_out(out: str, wrong: Callable[[str], NoReturn]) -> None:
    """A name with another suffix is meant as a file, unless a folder of that name is there or it ends in a slash."""
    suffix = Path(out).suffix
    if out.endswith((".lmdb", "/")) or not any(map(str.isalpha, suffix)) or Path(out).is_dir():
        return
    wrong(
        f"OUT is a file that ends with .lmdb, or a folder, got {out}: type {out.removesuffix(suffix)}.lmdb for one "
        f"store, or {out}/ for a folder of that name"
    )


def _check_free(paths: list[Path], overwrite: bool) -> None:
    from lightning_speedkit.errors import StoreWriteError

    there = [str(path) for path in paths if path.exists()]
    if there and not overwrite:
        are, them = ("are", "them") if len(there) > 1 else ("is", "it")
        names = " and ".join(filter(None, (", ".join(there[:-1]), there[-1])))
        raise StoreWriteError(f"{names} {are} there already: give --overwrite to replace {them}, or another OUT.")


def _list_skipped(report: PackReport) -> None:
    sys.stdout.flush()
    count = len(report.skipped)
    left_out = "1 bad sample was left out" if count == 1 else f"{count:,} bad samples were left out"
    if report.unread:
        files = ", ".join(path.name for path in report.unread[:_LISTED_FILES])
        more = len(report.unread) - _LISTED_FILES
        files += f" and {more:,} more" if more > 0 else ""
        left_out = f"At least {left_out}; the rest of {files} could not be read, and its samples are lost"
    print(f"{left_out}:", file=sys.stderr)
    for line in report.skipped[:_LISTED]:
        print(f"  {line}", file=sys.stderr)
    if count > _LISTED:
        print(f"  and {count - _LISTED:,} more", file=sys.stderr)


def _print(report: PackReport, source: Source) -> None:
    from lightning_speedkit.cli.terminal import print_pairs

    seconds = max(report.seconds, 1e-6)
    rate = f"{report.total / seconds:,.0f} samples/s, {report.payload_bytes / seconds / 1e6:,.1f} MB/s"
    pairs = [("read as", source.format)]
    pairs += [(f"samples of {path.name}", f"{report.samples[name]:,}") for name, path in report.paths.items()]
    if report.skipped:
        pairs.append(("left out", f"{'at least ' if report.unread else ''}{len(report.skipped):,}"))
    if source.classes:
        pairs.append(("classes", f"{len(source.classes):,}, named in {_class_files(report)}"))
    pairs += [("payload bytes", f"{report.payload_bytes:,}"), ("seconds", _two_digits(report.seconds)), ("rate", rate)]
    pairs += [("note", note) for note in source.notes()]
    folder = next(iter(report.paths.values())).parent
    print_pairs(pairs, title=f"{folder}: packed")


def _two_digits(seconds: float) -> str:
    return f"{seconds:.2g}" if seconds < 9.95 else f"{seconds:,.0f}"


def _class_files(report: PackReport) -> str:
    from lightning_speedkit.data.sources.class_names import classes_path

    return " and ".join(classes_path(path).name for path in report.paths.values())

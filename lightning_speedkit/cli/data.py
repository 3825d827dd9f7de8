"""``speedkit data bench PATH``: how fast a store is read here, next to what this machine can do, and what bounds it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lightning_speedkit.cli.command_line import modules_of_this_folder, whole_number
from lightning_speedkit.cli.image_option import check_images, encoded_pictures, image_fields, parse_image

if TYPE_CHECKING:
    from lightning_speedkit.data.loading.loader_speed import LoaderPass, LoaderSpeed
    from lightning_speedkit.facts.storage import StorageSpeed

__all__ = ["add_parser"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand to the ``speedkit`` parser."""
    parser = subparsers.add_parser("data", help="measure how fast data is read", description="About data on disk.")
    commands = parser.add_subparsers(dest="data_command", metavar="COMMAND", required=True)
    bench = commands.add_parser(
        "bench",
        help="measure how fast a store is loaded, and what bounds it",
        description=(
            "Loads batches of an LMDB store, or of each one in a folder, as training does, and compares with what one "
            "core of this machine can copy and with its disk. Nothing is written to the store."
        ),
    )
    bench.add_argument("path", metavar="PATH", help="a store, or a folder whose *.lmdb files are measured in turn")
    bench.add_argument("--batch-size", type=whole_number(1), default=32, metavar="N", help="samples per batch (32)")
    bench.add_argument(
        "--workers", type=whole_number(0), metavar="N", help="threads or processes; 0 for none (chosen by itself)"
    )
    bench.add_argument(
        "--seconds", type=_seconds, default=3.0, metavar="S", help="about how long each measurement takes (3)"
    )
    bench.add_argument("--cold", action="store_true", help="drop the store from the page cache before the first pass")
    bench.add_argument(
        "--image", action="append", default=[], type=parse_image, metavar="KEY=SIZE",
        help="decode the pictures at that key or position of a sample to SIZE x SIZE; may be given several times",
    )  # fmt: skip
    bench.add_argument("--transform", metavar="MODULE:FUNCTION", help="a function that is called with each sample")
    bench.add_argument("--compare", action="store_true", help="measure torch's DataLoader over the same store too")
    bench.add_argument("--no-disk", action="store_true", help="do not measure the disk, for which a file is written")
    bench.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)

    def call(args: argparse.Namespace) -> int:
        return run(args, bench.error)

    bench.set_defaults(run=call)


def run(args: argparse.Namespace, wrong: Callable[[str], NoReturn]) -> int:
    """Prints a table for each store. A wrong command line is told to ``wrong``."""
    import os

    from lightning_speedkit.errors import StoreNotFoundError

    if not os.path.isdir(args.path):  # noqa: PTH112  # unlike Path.is_dir it also takes a name that is too long
        stores = [Path(args.path)]
    elif not (stores := sorted(Path(args.path).glob("*.lmdb"))):
        raise StoreNotFoundError(f"The folder {args.path} holds no *.lmdb file.")
    check_images(args.image, stores, wrong)
    with modules_of_this_folder():
        transform = None if args.transform is None else _function(args.transform)
        disk = None if args.no_disk else _disk(stores[0].absolute().parent, args.seconds)
        for number, store in enumerate(stores):
            if number:
                print()
            _bench(store, args, transform, disk)
    return 0


def _bench(store: Path, args: argparse.Namespace, transform: Any, disk: StorageSpeed | str | None) -> None:
    from lightning_speedkit.cli.terminal import print_pairs
    from lightning_speedkit.data.loading.loader_speed import first_pass_bound
    from lightning_speedkit.data.store.lmdb_dataset import LMDBDataset
    from lightning_speedkit.measure import read_hardware
    from lightning_speedkit.measure.memory_copy import measure_memory_copy

    fields = image_fields(args.image, store) or None
    collate = _collate_for(LMDBDataset(store, transform=transform, fields=fields), args.batch_size)
    if args.cold:
        _forget(store)
    dataset = LMDBDataset(store, transform=transform, fields=fields)
    speed = _ring(dataset, args, collate)
    without = _without_work(store, args, fields, transform)
    sample_bytes = max(1, speed.warm.bytes // max(1, speed.warm.samples))
    copy = measure_memory_copy(sample_bytes, rows=min(args.batch_size, len(dataset)), seconds=min(1.0, args.seconds))
    rate = None if disk is None or isinstance(disk, str) else disk.sequential_read_mb_per_second * 1e6
    size = f"{store.stat().st_size / 1e6:,.1f} MB; {sample_bytes:,} bytes per sample when loaded"
    pairs = [
        ("store", f"{len(dataset):,} samples, {size}"),
        ("machine", read_hardware("cpu").describe()),
        ("first pass", f"{_rate(speed.first)}: {first_pass_bound(speed, disk_bytes_per_second=rate)}"),
        ("from memory", f"{_rate(speed.warm)}, {speed.warm.bytes_per_second / copy:.0%} of the memory copy"),
        ("memory copy", f"{copy / sample_bytes:,.0f} samples/s, {copy / 1e6:,.0f} MB/s: one core, random samples"),
        ("disk", "not measured" if disk is None else disk if isinstance(disk, str) else disk.describe()),
    ]
    if collate is not None:
        pairs.insert(1, ("batches", "lists of samples, which are too different to be put together without a collate"))
    asked = [key for key, _ in args.image]
    if left := [key for key in encoded_pictures(store) if key not in asked]:
        which = f"encoded at {', '.join(map(repr, left))}, and not decoded here; to measure that, add"
        pairs.insert(1, ("pictures", f"{which} {' '.join(f'--image {key}=224' for key in left)}"))
    pairs.extend((f"without {work}", _rate(read)) for work, read in without.items())
    if args.compare:
        pairs.extend(_torch_loaders(dataset, args, collate))
    pairs.extend(_verdict(dataset, collate, speed, without, copy))
    print_pairs(pairs, title=str(store))


def _without_work(store: Path, args: argparse.Namespace, fields: Any, transform: Any) -> dict[str, LoaderPass]:
    """The same store without the transform, without decoding, or without either and without both, if there are both."""
    from lightning_speedkit.data.store.lmdb_dataset import LMDBDataset

    kept = {} if transform is None else {"transform": fields}
    kept |= {} if fields is None else {"decoding" if transform is None else "both": None}
    plain = {work: LMDBDataset(store, fields=left) for work, left in kept.items()}
    return {work: _ring(each, args, _collate_for(each, args.batch_size)).warm for work, each in plain.items()}


def _verdict(
    dataset: Any, collate: Any, speed: LoaderSpeed, without: dict[str, LoaderPass], copy: float
) -> list[tuple[str, str]]:
    from lightning_speedkit.data.loading.batch_builder import StoreBatches, builder_for
    from lightning_speedkit.data.loading.loader_speed import what_bounds
    from lightning_speedkit.measure import read_hardware

    bound = what_bounds(
        speed.warm,
        copy_bytes_per_second=copy,
        plain=next(reversed(without.values()), None),
        decoded=without.get("transform") if "both" in without else None,
        work=next(iter(without), ""),
        python=not isinstance(builder_for(dataset, collate), StoreBatches),
        store_bytes=dataset.path.stat().st_size,
        memory_bytes=read_hardware("cpu").memory_bytes,
    )
    return [("bound by", bound.name), ("advice", bound.advice)]


def _ring(dataset: Any, args: argparse.Namespace, collate: Callable[[Any], Any] | None = None) -> LoaderSpeed:
    from lightning_speedkit.data.loading.loader import RingLoader
    from lightning_speedkit.data.loading.loader_speed import measure_loader

    loader = RingLoader(dataset, batch_size=args.batch_size, shuffle=True, num_workers=args.workers, collate=collate)
    try:
        return measure_loader(loader, seconds=args.seconds)
    finally:
        loader.close()


def _collate_for(dataset: Any, batch_size: int) -> Callable[[Any], Any] | None:
    """None for the usual one; ``list`` for samples of different sizes, which it cannot stack."""
    from lightning_speedkit.data.loading.collate import collate_samples

    try:
        samples = [dataset[index] for index in range(0, len(dataset), max(1, len(dataset) // batch_size))]
    except Exception:
        return None  # the loader meets it too, and names the sample
    finally:
        dataset.close()
    try:
        collate_samples(samples)
    except (TypeError, ValueError):
        return list
    return None


def _torch_loaders(dataset: Any, args: argparse.Namespace, collate: Any) -> Iterable[tuple[str, str]]:
    import torch
    from torch.utils.data import DataLoader

    from lightning_speedkit.data.loading.collate import collate_samples
    from lightning_speedkit.data.loading.loader_speed import measure_loader

    for workers in sorted({0, 2 if args.workers is None else args.workers}):
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=args.batch_size,
            shuffle=True,
            num_workers=workers,
            collate_fn=collate or collate_samples,
            persistent_workers=workers > 0,
            generator=torch.Generator(),
        )
        yield f"DataLoader, {workers} workers", _rate(measure_loader(loader, seconds=args.seconds).warm)


def _rate(read: LoaderPass) -> str:
    return f"{read.samples_per_second:,.0f} samples/s, {read.bytes_per_second / 1e6:,.0f} MB/s"


def _disk(folder: Path, seconds: float) -> StorageSpeed | str:
    """The speed of the disk, or why it is not known."""
    from lightning_speedkit.measure.storage import measure_storage

    try:
        return measure_storage(folder, seconds=seconds)
    except OSError as error:
        return f"not measured: {error}"


def _forget(store: Path) -> None:
    import os

    from lightning_speedkit.errors import SpeedkitError

    if not hasattr(os, "posix_fadvise"):
        raise SpeedkitError("--cold needs posix_fadvise, which this system does not have. Leave it out.")
    with store.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _function(name: str) -> Callable[[Any], Any]:
    from lightning_speedkit.data.argument_checks import a_type
    from lightning_speedkit.data.sources.python_function import find_python_name
    from lightning_speedkit.errors import SourceError

    try:
        found = find_python_name(name)
    except SourceError as error:
        raise SourceError(f"--transform {error}") from error
    if not callable(found):
        raise SourceError(f"--transform {name}: {a_type(found)} cannot be called.")
    transform: Callable[[Any], Any] = found
    return transform


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value

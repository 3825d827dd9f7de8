"""Seconds to bring a store to another folder: a plain copy with fsync, staging it, and finding it staged already.

Staging reads the copy back and compares all checksums, which the plain copy does not. Source and target lie on one
disk, and the source is in the page cache: what is measured is the cost of staging itself, not of a far source. One
variant fetches the store from a web server on this machine, and its time includes importing fsspec and aiohttp.

    python -m benchmarks.staging [--rounds 5] [--smoke]
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from benchmarks.harness import Variant, benchmark_arguments, run_benchmark

_FUNCTION = "benchmarks.staging:measure"


def measure(source: str, how: str) -> dict[str, float]:
    """Bring the source to a new folder beside it; seconds, and bytes per second."""
    from lightning_speedkit.data import stage_to_local

    with tempfile.TemporaryDirectory(dir=Path(source).parent) as folder:
        if how == "staged before":
            stage_to_local(source, folder=folder)
        with contextlib.ExitStack() as held:
            address = held.enter_context(_web_server(Path(source))) if how == "over http" else source
            start = time.perf_counter()
            if how == "plain copy":
                copy = Path(shutil.copyfile(source, Path(folder, "copy.lmdb")))
                with copy.open("rb") as file:
                    os.fsync(file.fileno())
            else:
                copy = stage_to_local(address, folder=folder)
            seconds = time.perf_counter() - start
        return {"seconds": seconds, "bytes_per_second": copy.stat().st_size / seconds}


@contextlib.contextmanager
def _web_server(path: Path) -> Iterator[str]:
    """Python's own, which sends whole files only."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(path.parent)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/{path.name}"
    finally:
        server.shutdown()
        server.server_close()


def main() -> None:
    """Write a store, measure, and write the results."""
    from lightning_speedkit.data import write_lmdb

    options = benchmark_arguments("Seconds to bring a store to another folder.", 5)
    with tempfile.TemporaryDirectory(prefix="staging-") as folder:
        samples = ((os.urandom(1 << 18), i) for i in range(8 if options.smoke else 512))
        source = str(write_lmdb(samples, Path(folder, "train.lmdb")))
        run_benchmark(
            "staging",
            [
                Variant(how, _FUNCTION, {"source": source, "how": how})
                for how in ("plain copy", "staged", "staged before", "over http")
            ],
            baseline="plain copy",
            rounds=options.rounds,
            warmup=options.warmup,
            forked=options.smoke,
            higher_is_better=["bytes_per_second"],
            results=options.results,
        )


if __name__ == "__main__":
    main()

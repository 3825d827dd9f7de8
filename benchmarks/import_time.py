"""What ``import lightning_speedkit`` adds to ``import lightning``.

Each run is a fresh interpreter with bytecode caches, as in an installed package: seconds from a started interpreter to
lightning imported, and from there to the kit imported.

    python -m benchmarks.import_time [--rounds 9] [--smoke]
"""

from __future__ import annotations

import importlib
import tempfile
import time


def measure(module: str = "") -> dict[str, float]:
    """Import lightning, then the module if one is named; seconds for each."""
    start = time.perf_counter()
    importlib.import_module("lightning")
    middle = time.perf_counter()
    if module:
        importlib.import_module(module)
    return {"seconds_lightning": middle - start, "seconds_added": time.perf_counter() - middle}


def main() -> None:
    """Measure and write the results."""
    from benchmarks.harness import Variant, benchmark_arguments, run_benchmark  # it imports what is measured here

    options = benchmark_arguments("What importing the kit adds to importing lightning.", 9)
    with tempfile.TemporaryDirectory() as cache:
        run_benchmark(
            "import_time",
            [Variant("lightning_speedkit", "benchmarks.import_time:measure", {"module": "lightning_speedkit"})],
            rounds=options.rounds,
            warmup=options.warmup,
            # the warm-up run, which a smoke run has not, fills the cache; the sources may lie where none may be written
            environment=None if options.smoke else {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": cache},
            results=options.results,
        )


if __name__ == "__main__":
    main()

"""2,000 raw tensors of 602 KB, shuffled, batch 32.

python -m benchmarks.data.large [--rounds 5] [--smoke]
"""

from __future__ import annotations

from benchmarks.data.loading import run

if __name__ == "__main__":
    run("large")

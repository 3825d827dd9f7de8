"""20,000 raw tensors of 12 KB, shuffled, batch 128.

python -m benchmarks.data.tensors [--rounds 5] [--smoke]
"""

from __future__ import annotations

from benchmarks.data.loading import run

if __name__ == "__main__":
    run("tensors")

"""3,000 JPEG files, decoded and resized to 224, shuffled, batch 64.

python -m benchmarks.data.images [--rounds 5] [--smoke]
"""

from __future__ import annotations

from benchmarks.data.loading import run

if __name__ == "__main__":
    run("images")

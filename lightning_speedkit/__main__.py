"""``python -m lightning_speedkit`` is the ``speedkit`` command."""

from __future__ import annotations

import sys

from lightning_speedkit.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

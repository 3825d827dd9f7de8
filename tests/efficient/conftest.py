"""What needs a network of timm or torchvision is collected where both are installed."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("timm") is None or find_spec("torchvision") is None:
    collect_ignore = ["test_backbone.py", "test_backbone_build.py", "test_backbone_costs.py"]

"""Lighter networks: an efficient backbone under a budget, and lighter layers in a network that is there."""

from lightning_speedkit.architecture.backbone import pick_backbone
from lightning_speedkit.architecture.backbone_build import build_backbone, published_accuracies
from lightning_speedkit.architecture.backbone_table import Backbone, BackboneTable
from lightning_speedkit.architecture.depthwise import SeparableConv, separate_convolution
from lightning_speedkit.architecture.lighten import apply_plan, lighten
from lightning_speedkit.architecture.lighten_report import LightenReport, LighterLayer
from lightning_speedkit.architecture.low_rank import FactoredLinear, factor_linear

__all__ = [
    "Backbone",
    "BackboneTable",
    "FactoredLinear",
    "LightenReport",
    "LighterLayer",
    "SeparableConv",
    "apply_plan",
    "build_backbone",
    "factor_linear",
    "lighten",
    "pick_backbone",
    "published_accuracies",
    "separate_convolution",
]

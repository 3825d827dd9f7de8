"""Techniques that make a trained model smaller and faster to run."""

from lightning_speedkit.compress.artefact import load_quantized, save_quantized
from lightning_speedkit.compress.conversion import QuantizationDetails, quantize_model
from lightning_speedkit.compress.convert import convert_model
from lightning_speedkit.compress.distill import Distillation, distillation_loss
from lightning_speedkit.compress.engine import Converted
from lightning_speedkit.compress.prune import Pruning, prune_weights
from lightning_speedkit.compress.prune_masks import PruningMasks
from lightning_speedkit.compress.prune_scores import sparsity_at
from lightning_speedkit.compress.prune_semi_structured import to_semi_structured
from lightning_speedkit.compress.quantize import QuantizeOnFitEnd
from lightning_speedkit.compress.quantize_aware import FakeQuantization, QuantizationAwareTraining
from lightning_speedkit.compress.report import CandidateReport, QuantizationReport
from lightning_speedkit.compress.shrink import (
    ShrinkPlan,
    ShrinkReport,
    StructuredPruning,
    load_shrunk,
    resize_to,
    shrink_model,
)

__all__ = [
    "CandidateReport",
    "Converted",
    "Distillation",
    "FakeQuantization",
    "Pruning",
    "PruningMasks",
    "QuantizationAwareTraining",
    "QuantizationDetails",
    "QuantizationReport",
    "QuantizeOnFitEnd",
    "ShrinkPlan",
    "ShrinkReport",
    "StructuredPruning",
    "convert_model",
    "distillation_loss",
    "load_quantized",
    "load_shrunk",
    "prune_weights",
    "quantize_model",
    "resize_to",
    "save_quantized",
    "shrink_model",
    "sparsity_at",
    "to_semi_structured",
]

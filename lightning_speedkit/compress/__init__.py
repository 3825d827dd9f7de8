"""Techniques that make a trained model smaller and faster to run."""

from lightning_speedkit.compress.artefact import load_quantized, save_quantized
from lightning_speedkit.compress.conversion import QuantizationDetails, quantize_model
from lightning_speedkit.compress.quantize import QuantizeOnFitEnd
from lightning_speedkit.compress.report import QuantizationReport

__all__ = [
    "QuantizationDetails",
    "QuantizationReport",
    "QuantizeOnFitEnd",
    "load_quantized",
    "quantize_model",
    "save_quantized",
]
